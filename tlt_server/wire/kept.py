"""Files that the engine writes and the frontend reads.

`weights/current.json` under the state directory records the live weights: the spool writes it with
every commit, and the frontend uses it to serve the drafter. `started` lists the sequences that the
engine has started, for the frontend after the engine's death: unlike a message in a dying process,
a written file is not lost. `drafter-form.json` is the trainer's, for the engine's next start.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from tlt_server.process.private import private_file

WEIGHTS, CURRENT = "weights", "current.json"
FORM = "drafter-form.json"


class KeptVersion(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The live version of a role or an adapter, with the place of its files."""

    version: str
    digest: str
    directory: str  # below the spool; empty: the model directory the server was started with


class Current(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str  # the directory the server was started with
    roles: dict[str, KeptVersion]
    adapters: dict[str, KeptVersion] = {}  # LoRA adapters by name


class DrafterForm(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trainer's finding that a drafter may be kept in FP8. The next start reads it."""

    drafter: str  # the directory the server was started with
    lost: float  # share of the accept length

    def write(self, file: Path) -> None:
        draft = file.with_suffix(".part")
        with open(draft, "wb", opener=private_file) as content:
            content.write(msgspec.json.encode(self))
        os.replace(draft, file)


def read_form(file: Path, drafter: Path) -> DrafterForm | None:
    """Return what was found of a drafter; None if it may not, or is not known."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=DrafterForm)
    except (OSError, ValueError):
        return None
    return found if found.drafter == str(drafter.resolve()) else None


NAME = "started"
OTHERS = ""  # instead of the ids of sequences that a gateway does not know
END = b"\n\n"  # after the last id; an older, longer list may leave bytes after it


class StartedFile:
    def __init__(self, directory: Path) -> None:
        self._file = private_file(directory / NAME, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def note(self, ids: Sequence[str]) -> None:
        """Record the ids of all sequences that run from now on."""
        os.pwrite(self._file, "\n".join(ids).encode() + END, 0)


def read_started(directory: Path) -> set[str]:
    """Return the last recorded ids; none without a file."""
    try:
        ids, end, _ = (directory / NAME).read_bytes().partition(END)
    except FileNotFoundError:
        return set()
    return set(ids.decode().split("\n")) if end else set()
