"""The phases of an engine's start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OnPhase = Callable[[str, float, str], None]  # name, seconds, detail


class Phases:
    """The seconds of each phase of a start, reported as it ends."""

    def __init__(self, on_phase: OnPhase) -> None:
        self.seconds: dict[str, float] = {}
        self._on_phase = on_phase

    @contextmanager
    def __call__(self, name: str) -> Iterator[list[str]]:
        """Time the block; what it appends to the list is reported as detail."""
        started = time.perf_counter()
        detail: list[str] = []
        yield detail
        self.seconds[name] = time.perf_counter() - started
        self._on_phase(name, self.seconds[name], "".join(detail))
