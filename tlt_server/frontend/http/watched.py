"""Files that are read again when they change, so that API keys and certificates can be replaced
without a restart.

The files are checked when their content is used, at most once a second, so no background task can
die. An unusable change is logged as an error, once, and the old content stays active.
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
OnRead = Callable[[Literal["read", "refused"]], None]
log = structlog.get_logger()


class Watched(Generic[Held]):
    """Watched files' content, as returned by `read`."""

    def __init__(
        self,
        name: str,
        files: Sequence[Path],
        read: Callable[[], Held],
        on_read: OnRead = lambda result: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read`: raises `StartupError` for unusable content; so does this at the start. `on_read`:
        counts reads for the metrics.
        """
        self._name, self._files, self._read = name, files, read
        self._on_read, self._clock = on_read, clock
        self._marks, self._looked_s = self._look(), clock()
        self._held = read()
        on_read("read")

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
                remedy="correct it; its old content stays in force",
            )
            self._on_read("refused")
        else:
            log.info("file_read", what=self._name)
            self._on_read("read")

    def _look(self) -> list[tuple[int, ...]]:
        """Return a mark of each file, which changes when the file is written, replaced or removed.

        Marks are taken before the files are read, so a write in between is noticed next time.
        """
        found: list[tuple[int, ...]] = []
        for file in self._files:
            try:
                about = file.stat()
                found.append((about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns))
            except OSError:
                found.append(())
        return found
