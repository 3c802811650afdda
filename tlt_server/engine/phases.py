"""The phases of an engine's start, announced at their start and reported at their end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OnPhase = Callable[[str, float, str], None]  # name, seconds, detail
OnProgress = Callable[[str, int, int], None]  # what is done, steps done, of how many


class Phases:
    """The seconds of each phase of a start. The announcement of a phase has 0 of 0 steps."""

    def __init__(self, on_phase: OnPhase, on_progress: OnProgress) -> None:
        self.seconds: dict[str, float] = {}
        self._on_phase, self._on_progress = on_phase, on_progress

    @contextmanager
    def __call__(self, name: str) -> Iterator[list[str]]:
        """Time the block; the report shows the strings that the block appends to the list."""
        self._on_progress(name, 0, 0)
        started = time.perf_counter()
        detail: list[str] = []
        yield detail
        self.seconds[name] = time.perf_counter() - started
        self._on_phase(name, self.seconds[name], "".join(detail))
