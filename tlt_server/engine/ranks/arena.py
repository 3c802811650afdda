"""The memory of a rank's shard, written by rank 0 and read by the rank: on a CPU a file in memory,
on a GPU an allocation of rank 0 on the rank's GPU.

Rank 0 builds the same model as the rank on the same memory, so it can write the rank's slices. Both
place tensors in the order in which the model requests them; `layout` verifies it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tlt_client.channels.errors import ChannelLost
from tlt_client.channels.memory import GRANT, Grant, SharedGpuMemory
from tlt_server.attention.backing import Backing
from tlt_server.models.decoder import Decoder
from tlt_server.models.shards import all_tensors, tensors_of

ALIGNMENT = 256  # bytes; torch's own allocators give no less on a CPU or a GPU


class Arena:
    """A mapping of the memory, `content`, as uint8. Other processes map it by `descriptors` and
    `grant`.
    """

    def __init__(
        self, data: Tensor, descriptors: Sequence[int] = (), shared: SharedGpuMemory | None = None
    ) -> None:
        """data: the whole memory, uint8."""
        self.content, self.descriptors, self._shared, self.used = data, descriptors, shared, 0
        self.grant = shared.grant.packed() if shared else bytes(GRANT.size)
        self._size, self._device = len(data), data.device
        self._taken: list[tuple[int, Tensor]] = []  # with the byte where it begins

    @classmethod
    def file(cls, size: int) -> Arena:
        descriptor = os.memfd_create("tlt-shard", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)  # a sleep takes pages
        return cls(_mapped(descriptor), (descriptor,))

    @classmethod
    def shared(cls, size: int, device: torch.device) -> Arena:
        """Allocate shared memory. `torch.OutOfMemoryError` if the device has too little."""
        if device.type != "cuda":
            return cls.file(size)
        try:
            memory = SharedGpuMemory.share(size, device)
        except ChannelLost as error:
            raise torch.OutOfMemoryError(
                f"out of memory: {device} has no room for a rank's {size} bytes "
                f"({error.__context__})"
            ) from None
        return cls(memory.view, shared=memory)

    @classmethod
    def opened(cls, grant: bytes, descriptors: Sequence[int]) -> Arena:
        """Map the memory that another process has allocated."""
        if descriptors:
            return cls(_mapped(descriptors[0]), descriptors)
        memory = SharedGpuMemory.open(Grant.parsed(grant), ())
        return cls(memory.view, shared=memory)

    def fill(self, make: Callable[[], Any]) -> Any:
        """Return a model whose storage lies here, with the memory's present content."""
        with _Carving(self):
            return make()

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        start = -(-self.used // ALIGNMENT) * ALIGNMENT
        self.used = start + torch.Size(shape).numel() * dtype.itemsize
        # A view would hold on to the memory after `move`.
        taken = torch.empty(0, dtype=dtype, device=self._device)
        self._taken.append((start, taken))
        self._lay(taken, start, shape)
        return taken

    def _lay(self, tensor: Tensor, start: int, shape: tuple[int, ...]) -> None:
        tensor.set_(self.content.untyped_storage(), start // tensor.itemsize, shape)  # type: ignore[call-overload]

    def let_go(self) -> None:
        """Free or unmap the memory; its tensors stay. Nothing may read them before `move`."""
        if self._device.type == "cuda":
            self.free()
        else:
            Backing(self.content).free()

    def renew(self) -> None:
        """Allocate memory again; `torch.OutOfMemoryError` if the device has too little."""
        self.move(Arena.shared(self._size, self._device))

    @torch.inference_mode()
    def move(self, other: Arena) -> None:
        """Move all tensors to another arena, at the same offsets."""
        self.content, self.descriptors = other.content, other.descriptors
        self._shared, self.grant = other._shared, other.grant
        for start, tensor in self._taken:
            self._lay(tensor, start, tensor.shape)

    def close(self) -> None:
        """Close the file; mappings stay."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()

    def free(self) -> None:
        """Free or unmap a GPU's memory that nothing reads any more. A file's memory ends with its
        tensors.
        """
        if self._shared is not None:
            self.content = torch.empty(0, dtype=torch.uint8)
            self._shared.close()
            self._shared = None


def arena_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the size of an arena for these tensors, which need no storage."""
    return sum(tensor.nbytes + ALIGNMENT for tensor in tensors) + ALIGNMENT


def layout(model: Decoder) -> str:
    """Return the offset of each tensor of the model, as text to compare."""
    views = model.own_parameters()
    base = min(view.untyped_storage().data_ptr() for view in all_tensors(views))
    return ";".join(
        f"{name}@{view.data_ptr() - base}{list(view.shape)}{list(view.stride())}"
        for name, stored in views.items()
        for view in tensors_of(stored)
    )


def _mapped(descriptor: int) -> Tensor:
    size = os.fstat(descriptor).st_size
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


class _Carving(TorchFunctionMode):
    """A torch mode that places new tensors in the arena. A new arena is zero; an opened one keeps
    its content.
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
