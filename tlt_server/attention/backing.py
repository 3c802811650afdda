"""The memory of a tensor, given back while the tensor stays: what holds the tensor, or a view of
it, notices nothing.

On a GPU the storage is emptied and allocated again, perhaps at another address. On the host whole
pages go back to the system and are zeros when they are touched again; what shares a page with other
data stays. Pages that are pinned for a GPU are let go first: dropped under it, they would be two
different pages to host and GPU. Either way the content is lost.
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
        """Give the memory back; nothing may read the tensor before `reclaim`."""
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
        """Take the memory again, content undefined; `torch.OutOfMemoryError` when it is gone."""
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
    """Give pages back: of a file in memory those of all who map it, else those of this process."""
    for advice in (mmap.MADV_REMOVE, mmap.MADV_DONTNEED):
        if not _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), advice):
            return
    raise OSError(ctypes.get_errno(), "madvise failed")


def give_back() -> None:
    """Give what backings have freed to other processes, not to the allocator of this one. Waits for
    the whole GPU, so it is not called while a trainer keeps it waiting (`Groups.hold_gpu`).
    """
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
