"""Frees the memory of a tensor while the tensor stays: holders of the tensor, or of a view, need no
change.

On a GPU the storage is emptied and allocated again, perhaps at another address. On the host whole
pages return to the system and are zero when they are next touched; a page shared with other data
stays. Pages pinned for a GPU are unpinned first: if they were dropped while pinned, host and GPU
would see two different pages. Either way the content is lost.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

from tlt_server.attention.pinned import block_at

_libc = ctypes.CDLL(None, use_errno=True)


class Backing:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.storage = tensor.untyped_storage()
        self.size = self.storage.nbytes()

    def free(self) -> None:
        """Free the memory; nothing may read the tensor before `reclaim`."""
        if self.storage.device.type == "cpu":
            block = block_at(self.storage.data_ptr())
            if block is not None:
                block.unpin()
            first = -(-self.storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            length = (self.storage.data_ptr() + self.size) // mmap.PAGESIZE * mmap.PAGESIZE - first
            if length > 0:
                _drop(first, length)
        else:
            self.storage.resize_(0)

    def reclaim(self) -> None:
        """Allocate the memory again, with undefined content; `torch.OutOfMemoryError` if there is
        too little.
        """
        if self.storage.device.type != "cpu":
            self.storage.resize_(self.size)
        elif (block := block_at(self.storage.data_ptr())) is not None:
            try:
                block.pin()
            except MemoryError as error:
                raise torch.OutOfMemoryError(str(error)) from None

    @property
    def contents(self) -> list[torch.Tensor]:
        return [self.bytes]

    @property
    def bytes(self) -> torch.Tensor:
        """Return a uint8 view."""
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)  # type: ignore[call-overload, no-any-return]


def _drop(first: int, length: int) -> None:
    """Free pages: of a file in memory, for all processes that map it, else those of this
    process.
    """
    for advice in (mmap.MADV_REMOVE, mmap.MADV_DONTNEED):
        if not _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), advice):
            return
    raise OSError(ctypes.get_errno(), "madvise failed")


def give_back() -> None:
    """Return memory freed by backings to the system rather than to this process's allocator. Waits
    for the whole GPU, so it is not called while a trainer keeps it waiting (`Groups.hold_gpu`).
    """
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
