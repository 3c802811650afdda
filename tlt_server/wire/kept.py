"""Files that the engine writes and the frontend reads.

`weights/current.json` under the state directory records which weights are live: the spool writes it
with every commit, and the frontend hands out the drafter by it. `started` lists the sequences that
the engine has started, for the frontend after its death: a message that is still in a process when
it dies is lost, and what was written to a file is not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from tlt_server.process.private import private_file

WEIGHTS, CURRENT = "weights", "current.json"


class KeptVersion(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The live version of a role, or of an adapter, and where its files are."""

    version: str
    digest: str
    directory: str  # below the spool; empty: the model directory the server was started with


class Current(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str  # the directory the server was started with
    roles: dict[str, KeptVersion]
    adapters: dict[str, KeptVersion] = {}  # LoRA adapters by name


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
