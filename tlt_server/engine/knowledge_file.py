"""The file in the state directory with the knowledge of steps and drafts, so that a restarted
engine need not measure and learn again.

It is written after the measurements at start, in idle time, and at the engine's end. A damaged
file, or one of another machine, model or number format, is not used; the start-up report says which
and why.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from tlt_server import __version__
from tlt_server.process.private import private_file
from tlt_server.speculation.knowledge import Knowledge, KnowledgeRecord
from tlt_server.wire.fingerprint import libraries

NAME = "knowledge.json"
MAX_BYTES = 2**20
EVERY_S = 60.0  # between two writes while the engine serves


class _Origin(Struct, frozen=True):
    """The part of the file that is read first, in the format of every version."""

    made_by: dict[str, str]


class _Content(Struct, frozen=True, forbid_unknown_fields=True):
    made_by: dict[str, str]
    knowledge: KnowledgeRecord


class KnowledgeFile:
    def __init__(
        self,
        directory: Path | None,
        made_by: dict[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`made_by`: everything that the times of steps depend on. `directory`: None keeps
        nothing.
        """
        self._path = directory / NAME if directory is not None else None
        self._made_by, self._clock = made_by, clock
        self._written_s = clock()

    def load(self, knowledge: Knowledge) -> str:
        """Restore the file's knowledge and return the file's path; empty if no file fits."""
        if self._path is None or not self._path.exists():
            return ""
        try:
            with self._path.open("rb") as file:
                data = file.read(MAX_BYTES)
            made_by = msgspec.json.decode(data, type=_Origin).made_by
            other = [
                f"{name} {made_by.get(name, 'unknown')!r}, now {value!r}"
                for name, value in self._made_by.items()
                if made_by.get(name) != value
            ]
            if other:
                raise ValueError(f"it was made with {'; '.join(other)[:300]}")
            knowledge.restore(msgspec.json.decode(data, type=_Content).knowledge)
        except (OSError, ValueError, RecursionError) as error:
            print(f"tlt: {self._path} is not used, and made again: {error}", file=sys.stderr)
            return ""
        return str(self._path)

    def save(self, knowledge: Knowledge) -> None:
        """Write the file, unless the next start should measure. On a full disk only the knowledge
        is lost.
        """
        self._written_s = self._clock()
        if self._path is None or not knowledge.cost.profiled:
            return
        content = msgspec.json.encode(_Content(self._made_by, knowledge.record()))
        draft = self._path.with_suffix(".new")
        try:
            with open(draft, "wb", opener=private_file) as file:
                file.write(content)
            os.replace(draft, self._path)
        except OSError as error:
            print(f"tlt: {self._path} cannot be written: {error.strerror}", file=sys.stderr)

    def save_now_and_then(self, knowledge: Knowledge) -> None:
        if self._clock() - self._written_s >= EVERY_S:
            self.save(knowledge)


def code() -> dict[str, str]:
    """Return the versions of the code that computes steps."""
    return {"version": __version__, **libraries()}


def profile_in(directory: Path | None) -> str:
    """Describe the measured times in this state directory. A server decides at its start, when it
    knows machine, model and settings, whether they fit.
    """
    if directory is None:
        return "none is kept (--state-dir keeps it): measured at each start"
    path = directory / NAME
    if not path.exists():
        return f"none yet in {directory}: measured at the next start"
    try:
        with path.open("rb") as file:
            made_by = msgspec.json.decode(file.read(MAX_BYTES), type=_Origin).made_by
    except (OSError, ValueError, RecursionError) as error:
        return f"{path} cannot be read, and will be made again: {error}"
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
    what = ", ".join(made_by[name] for name in ("processor", "model", "dtype") if name in made_by)
    return f"{path}, made {made} by {what}; used where machine, model and settings are the same"
