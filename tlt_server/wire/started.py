"""The sequences that the engine has started, on file. The scheduler's `on_start` writes it; the
frontend reads it after the engine's death.

A message may still be in the process when it dies, and is lost with it; what was written to a file
is not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tlt_server.process.private import private_file

NAME = "started"
END = b"\n\n"  # after the last id; an older, longer list may leave bytes after it


class StartedFile:
    def __init__(self, directory: Path) -> None:
        self._file = private_file(directory / NAME, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def note(self, ids: Sequence[str]) -> None:
        """Write down the ids of all sequences that run from now on."""
        os.pwrite(self._file, "\n".join(ids).encode() + END, 0)


def read_started(directory: Path) -> set[str]:
    """Return the ids of the last note; an empty result if there is no file."""
    try:
        ids, end, _ = (directory / NAME).read_bytes().partition(END)
    except FileNotFoundError:
        return set()
    return set(ids.decode().split("\n")) if end else set()
