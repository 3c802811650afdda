"""The memory behind a tensor, given back while the tensor stays: whoever holds it, or a view of it, need not be told.

On a GPU the storage is emptied and allocated again, perhaps at another address. On the host whole pages go back to the system and are
zeros when they are touched again; what shares a page with other data stays. Either way the content is lost.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

_libc = ctypes.CDLL(None, use_errno=True)


class Backing:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.storage = tensor.untyped_storage()
        self.size = self.storage.nbytes()

    def free(self) -> None:
        """Nothing may read the tensor before `reclaim`."""
        if self.storage.device.type == "cpu":
            first = -(-self.storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            length = (self.storage.data_ptr() + self.size) // mmap.PAGESIZE * mmap.PAGESIZE - first
            if length > 0 and _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED):
                raise OSError(ctypes.get_errno(), "madvise failed")
        else:
            self.storage.resize_(0)

    def reclaim(self) -> None:
        """On a GPU `torch.OutOfMemoryError` when others have taken the memory; the content is undefined."""
        if self.storage.device.type != "cpu":
            self.storage.resize_(self.size)

    @property
    def bytes(self) -> torch.Tensor:
        """uint8 view."""
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)  # type: ignore[call-overload, no-any-return]
