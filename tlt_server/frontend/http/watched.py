"""What files hold, read again when they change: API keys and certificates are replaced without a
restart.

Looked at when it is asked for, at most once a second, so there is no task that could die. A change
that cannot be used is an error in the log, once; what the files held before stays in force.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, Literal, TypeVar

import structlog

from tlt_server.errors import StartupError

LOOK_S = 1.0

Held = TypeVar("Held")
Told = Callable[[Literal["read", "refused"]], None]
log = structlog.get_logger()


class Watched(Generic[Held]):
    def __init__(
        self,
        name: str,
        files: Sequence[Path],
        read: Callable[[], Held],
        told: Told = lambda result: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read` raises `StartupError` for what cannot be used; here, at the start, so does this.
        `told` is for the metrics.
        """
        self._name, self._files, self._read, self._told, self._clock = (
            name,
            files,
            read,
            told,
            clock,
        )
        self._marks, self._looked_s = self._look(), clock()
        self._held = read()
        told("read")

    def __call__(self) -> Held:
        now = self._clock()
        if now - self._looked_s >= LOOK_S:
            self._looked_s = now
            marks = self._look()
            if marks != self._marks:
                self._marks = marks
                self._renew()
        return self._held

    def _renew(self) -> None:
        try:
            self._held = self._read()
        except StartupError as error:
            log.error(
                "file_refused",
                what=self._name,
                reason=error.message,
                remedy="correct it; what it held before stays in force",
            )
            self._told("refused")
        else:
            log.info("file_read", what=self._name)
            self._told("read")

    def _look(self) -> list[tuple[int, ...]]:
        """What differs when a file was written, replaced or removed. Taken before it is read: what
        is written meanwhile shows next time.
        """
        found: list[tuple[int, ...]] = []
        for file in self._files:
            try:
                about = file.stat()
                found.append((about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns))
            except OSError:
                found.append(())
        return found
