"""The memory of a rank's shard: one file in memory, which rank 0 writes and the rank reads.

Rank 0 makes the same model as the rank, on the same file, so it can write the rank's slices. Both
take the tensors in the order in which the model asks for them; `layout` proves it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tlt_server.models.decoder import Decoder

ALIGNMENT = 64  # bytes, as torch's own allocator gives


class Arena:
    """A mapping of the file. `size`: bytes; None opens one that another process made."""

    def __init__(self, descriptor: int, size: int | None = None) -> None:
        if size is not None:
            os.ftruncate(descriptor, size)
        self.descriptor, self.used = descriptor, 0
        self.size = os.fstat(descriptor).st_size
        self._bytes = torch.frombuffer(mmap.mmap(descriptor, self.size), dtype=torch.uint8)

    @classmethod
    def for_model(cls, make: Callable[[], Decoder]) -> Arena:
        """Return an arena of the size that such a model needs."""
        with torch.device("meta"):
            views = make().own_parameters().values()
        size = sum(view.nbytes + ALIGNMENT for view in views) + ALIGNMENT
        return cls(os.memfd_create("tlt-shard", os.MFD_CLOEXEC), size)

    def fill(self, make: Callable[[], Decoder]) -> Decoder:
        """Return a model whose storage lies here, with the content that the file has."""
        with _Carving(self):
            return make()

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        start = -(-self.used // ALIGNMENT) * ALIGNMENT
        self.used = start + torch.Size(shape).numel() * dtype.itemsize
        return self._bytes[start : self.used].view(dtype).view(shape)

    def close(self) -> None:
        """Close the file; what is mapped stays."""
        os.close(self.descriptor)


def layout(model: Decoder) -> str:
    """Return where each tensor of the model lies, as text to be compared."""
    views = model.own_parameters()
    base = min(view.untyped_storage().data_ptr() for view in views.values())
    return ";".join(
        f"{name}@{view.data_ptr() - base}{list(view.shape)}{list(view.stride())}"
        for name, view in views.items()
    )


class _Carving(TorchFunctionMode):
    """A mode in which new tensors lie in the arena, as it is: a new one is zeros, and the content
    of another's is left alone.
    """

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.empty, torch.zeros, torch.ones):
            return func(*args, **kwargs)
        shape = tuple(args[0]) if args and not isinstance(args[0], int) else tuple(args)
        return self._arena.take(shape, kwargs.get("dtype") or torch.get_default_dtype())
