"""What the engine has begun, on file: written by the scheduler's `on_start`, read by the frontend
once the engine is dead.

A message may still be in the process when it dies, and dies with it; what was written to a file
does not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

NAME = "begun"
END = b"\n\n"  # behind the last id; older, longer lists may leave bytes behind it


class Begun:
    def __init__(self, directory: Path) -> None:
        self._file = os.open(directory / NAME, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def note(self, ids: Sequence[str]) -> None:
        """These run from now on, and no others."""
        os.pwrite(self._file, "\n".join(ids).encode() + END, 0)


def read_begun(directory: Path) -> set[str]:
    """The ids of the last note; empty when there is none."""
    try:
        ids, end, _ = (directory / NAME).read_bytes().partition(END)
    except FileNotFoundError:
        return set()
    return set(ids.decode().split("\n")) if end else set()
