"""Pinned host buffers for asynchronous copies: a buffer is reused only after its copy is done."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class PinnedRing:
    def __init__(
        self,
        count: int,
        ints: int,
        *,
        pinned: bool,
        wait: Callable[[PinnedBuffer], None] | None = None,
    ) -> None:
        """`wait`: waits until a buffer has arrived, or raises; None: wait for the device."""
        self._wait = wait
        self._tensors = [
            torch.zeros(ints, dtype=torch.int32, pin_memory=pinned) for _ in range(count)
        ]
        self._events: list[torch.cuda.Event | None] = [
            torch.cuda.Event() if pinned else None for _ in range(count)
        ]
        self._next = 0

    def take(self) -> PinnedBuffer:
        """Return the next buffer, after its last copy."""
        at, self._next = self._next, (self._next + 1) % len(self._tensors)
        buffer = PinnedBuffer(self._tensors[at], self._events[at], self._wait)
        buffer.wait()
        return buffer


class PinnedBuffer:
    def __init__(
        self,
        tensor: Tensor,
        event: torch.cuda.Event | None,
        wait: Callable[[PinnedBuffer], None] | None = None,
    ) -> None:
        self.tensor, self._event, self._wait = tensor, event, wait

    @property
    def array(self) -> NDArray[np.int32]:
        return self.tensor.numpy()

    def mark(self) -> None:
        """Note that a copy of this buffer has just been queued on the current stream."""
        if self._event is not None:
            self._event.record()

    @property
    def arrived(self) -> bool:
        """Return True if the last copy is done."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Wait until the last copy is done. Raises as the ring's `wait` does."""
        if self._wait is not None:
            self._wait(self)
        elif self._event is not None:
            self._event.synchronize()
