"""Shared memory between engine and trainer: whether the trainer must stop, and whether it runs.

The frontend writes when a request is received, before it is read or admitted; the trainer reads it
between two segments, and writes whether it runs, which the engine reads after a step. Layout: WORDS
little-endian uint64 (magic, reasons to be busy, time of the first of them in nanoseconds of the
monotonic clock, number of the present sleep or 0, 1 while the trainer runs).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tlt_server.errors import StartupError
from tlt_server.process.private import private_file

MAGIC = int.from_bytes(b"tltbusy1", "little")
WORDS = 5
_BUSY, _SINCE, _ASLEEP, _RUNS = range(1, WORDS)

Reason = Literal["requests", "sequences", "weights", "engine"]
REASONS: frozenset[Reason] = frozenset(get_args(Reason))


def make_activity(path: Path) -> None:
    """Create the file for an engine that is not ready yet."""
    descriptor = private_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.write(descriptor, np.array([MAGIC, 1, time.monotonic_ns(), 0, 0], "<u8").tobytes())
    finally:
        os.close(descriptor)


def _mapped(path: Path) -> NDArray[np.uint64]:
    """Map the file. `StartupError` if it has another format."""
    try:
        descriptor = private_file(path, os.O_RDWR)
        try:
            word_W = np.frombuffer(mmap.mmap(descriptor, 8 * WORDS), "<u8")
        finally:
            os.close(descriptor)
        if int(word_W[0]) != MAGIC:
            raise ValueError("another file")
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} is not an activity file ({error})") from None
    return word_W


class Activity:
    """The frontend's half: counts the reasons to be busy. Without a file they are only kept in
    memory.
    """

    def __init__(self, path: Path | None = None, parks_for: Collection[Reason] = REASONS) -> None:
        """`parks_for`: the reasons that stop the trainer."""
        self._parks_for = parks_for
        self._word_W = np.zeros(WORDS, "<u8") if path is None else _mapped(path)
        self._count: Counter[Reason] = Counter({"engine": 1})
        self._sleeps = 0

    def set(self, reason: Reason, count: int) -> None:
        before = self._busy
        self._count[reason] = count
        if self._busy and not before:
            self._word_W[_SINCE] = time.monotonic_ns()
        self._word_W[_BUSY] = self._busy

    @property
    def _busy(self) -> int:
        return sum(self._count[reason] for reason in self._parks_for)

    @contextlib.contextmanager
    def during(self, reason: Reason) -> Iterator[None]:
        """Count one more reason during the block."""
        self.set(reason, self._count[reason] + 1)
        try:
            yield
        finally:
            self.set(reason, self._count[reason] - 1)

    def trainer_ended(self) -> None:
        """Clear the state of a trainer process that has ended."""
        self._word_W[_RUNS] = 0

    def sleeps(self, asleep: bool) -> None:
        if bool(self.asleep) != asleep:
            self._sleeps += asleep
            self._word_W[_ASLEEP] = self._sleeps if asleep else 0

    @property
    def asleep(self) -> int:
        """Return the number of the present sleep, from 1; 0 without one."""
        return int(self._word_W[_ASLEEP])


class ActivityReader:
    """The trainer's half. The engine reads `runs`."""

    def __init__(self, path: Path) -> None:
        self._word_W = _mapped(path)

    @property
    def busy(self) -> bool:
        return bool(self._word_W[_BUSY]) or bool(self.asleep)

    @property
    def asleep(self) -> int:
        """Return the number of the present sleep, from 1; 0 without one."""
        return int(self._word_W[_ASLEEP])

    @property
    def runs(self) -> bool:
        """Return True if the trainer runs."""
        return bool(self._word_W[_RUNS])

    @runs.setter
    def runs(self, value: bool) -> None:
        self._word_W[_RUNS] = value

    @property
    def age_ms(self) -> float:
        """Time since the engine became busy."""
        return max(0, time.monotonic_ns() - int(self._word_W[_SINCE])) / 1e6
