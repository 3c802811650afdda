"""The phases of an engine's start, announced when they begin and reported when they end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OnPhase = Callable[[str, float, str], None]  # name, seconds, detail
OnProgress = Callable[[str, int, int], None]  # what is done, steps done, of how many


class Phases:
    """The seconds of each phase of a start. A phase begins with 0 of 0 steps."""

    def __init__(self, on_phase: OnPhase, on_progress: OnProgress) -> None:
        self.seconds: dict[str, float] = {}
        self._on_phase, self._on_progress = on_phase, on_progress

    @contextmanager
    def __call__(self, name: str) -> Iterator[list[str]]:
        """Time the block; what it appends to the list is reported as detail."""
        self._on_progress(name, 0, 0)
        started = time.perf_counter()
        detail: list[str] = []
        yield detail
        self.seconds[name] = time.perf_counter() - started
        self._on_phase(name, self.seconds[name], "".join(detail))
