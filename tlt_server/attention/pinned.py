"""Host memory at a fixed address, so that a GPU copies to and from it directly: exactly as many
pages as a tensor needs.

Torch's own pinned memory comes in powers of two, and cannot be returned to the system while its
tensor lives. Here `unpin` unpins the pages, so that they can be dropped (`backing.py`), and `pin`
pins them again. Unused memory is unpinned in a thread, because the last view of a large version is
dropped between two steps.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from queue import SimpleQueue
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor

from tlt_client.channels import cuda
from tlt_server.process.threads import started


class Block:
    """Separately mapped pages."""

    def __init__(self, pages: mmap.mmap, pointer: int) -> None:
        self._pages, self.pointer, self._held = pages, pointer, False

    def pin(self) -> None:
        """Pin the pages. `MemoryError` if that fails."""
        if not self._held:
            try:
                cuda.pin(self.pointer, len(self._pages))
            except RuntimeError as error:
                raise MemoryError(
                    f"{len(self._pages)} bytes of the host's memory cannot be pinned: {error}"
                ) from None
            self._held = True

    def unpin(self) -> None:
        if self._held:
            self._held = False
            cuda.unpin(self.pointer)


_blocks: WeakValueDictionary[int, Block] = WeakValueDictionary()  # by address


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros in its own block. `MemoryError` or `OSError` if memory is short."""
    size, left = torch.Size(shape).numel() * dtype.itemsize, _left()
    pages = mmap.mmap(-1, max(1, size), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = (ctypes.c_uint8 * len(pages)).from_buffer(
        pages
    )  # lives as long as the tensor or a view of it
    block = Block(pages, ctypes.addressof(whole))
    block.pin()
    _blocks[block.pointer] = block
    finalize(whole, left.put, block).atexit = False
    return torch.frombuffer(whole, dtype=torch.uint8)[:size].view(dtype).view(shape)


def block_at(pointer: int) -> Block | None:
    """Return our block that begins at this address, or None."""
    return _blocks.get(pointer)


@cache
def _left() -> SimpleQueue[Block]:
    """Return the queue of blocks whose tensors are gone, for the thread that unpins them."""
    queue: SimpleQueue[Block] = SimpleQueue()

    def let_go() -> None:
        while True:
            queue.get().unpin()

    started("let go of pinned memory", let_go)
    return queue
