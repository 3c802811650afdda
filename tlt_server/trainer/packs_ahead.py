"""Packs that a thread reads on the host while a step runs on a GPU: at a 7B model's shapes a pack
has 58 MB of states, and reading them may take as long as a step of EAGLE. A CPU needs its
processors for the step, so there packs are read between two steps.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from tlt_server.trainer.pack import Cursor, Pack, Packer


class PacksAhead:
    """The packs of a `Packer`, on a device. Leaving the `with` waits for the one being read."""

    def __init__(
        self, packer: Packer, device: torch.device, dtype: torch.dtype, *, ahead: bool | None = None
    ) -> None:
        """`ahead`: read them so; None: on a GPU."""
        self._packer, self._device, self._dtype = packer, device, dtype
        self._ahead = device.type == "cuda" if ahead is None else ahead
        self._thread = ThreadPoolExecutor(1, "packs")
        self._coming: tuple[Cursor, Future[tuple[Pack, Cursor]]] | None = None

    def __enter__(self) -> PacksAhead:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.shutdown()

    def next(self, cursor: Cursor) -> tuple[Pack, Cursor]:
        """Return the pack at a cursor, and the cursor after it, as `Packer.next` does."""
        coming, self._coming = self._coming, None
        if coming is not None and coming[0] == cursor:
            pack, after = coming[1].result()
        else:
            pack, after = self._read(cursor)
        if self._ahead:
            self._coming = after, self._thread.submit(self._read, after)
        return pack.to(self._device, self._dtype), after

    def _read(self, cursor: Cursor) -> tuple[Pack, Cursor]:
        pack, after = self._packer.next(cursor)
        return pack.pinned() if self._device.type == "cuda" else pack, after
