"""The calibration tables of recorded trees, by version: a file next to the ring, written by the
engine and read by the trainer process. It has the newest KEPT tables, so older trees cannot be
drafted again.

A table's version is its drafter's key plus a digest of the table. The file is written
atomically.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from tlt_server.process.private import private_file

KEPT = 256
NAME = "tables"
MARK = "#"  # between the drafter's version and the digest

_CONTENT = msgspec.msgpack.Decoder(dict[str, bytes])


def table_file(ring: Path) -> Path:
    """Return the path of the tables for a ring of sequences."""
    return ring.with_name(f"{ring.name}-{NAME}")


def drafter_of(version: str) -> str:
    """Return the drafter version in a table's version; some records have only a drafter."""
    drafter, mark, _ = version.rpartition(MARK)
    return drafter if mark else version


class TableFile:
    """The tables of an engine, and their file. A write error leaves the file unchanged: trees are
    then not compared.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # The newest last, with those of an engine before.
        self._kept = {version: table.tobytes() for version, table in read_tables(path).items()}

    def add(self, drafter: str, acceptance_K: NDArray[np.float32]) -> str:
        """Add a table, and return its version."""
        content = acceptance_K.astype("<f4").tobytes()
        version = f"{drafter}{MARK}{xxhash.xxh3_64_hexdigest(content)}"
        if self._kept.pop(version, None) is None:
            self._kept[version] = content
            for old in [*self._kept][:-KEPT]:
                del self._kept[old]
            self._write()
        else:
            self._kept[version] = content
        return version

    def _write(self) -> None:
        draft = self._path.with_suffix(".part")
        try:
            descriptor = private_file(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            with open(descriptor, "wb") as file:
                file.write(msgspec.msgpack.encode(self._kept))
            os.replace(draft, self._path)
        except OSError:
            draft.unlink(missing_ok=True)


def read_tables(path: Path) -> dict[str, NDArray[np.float32]]:
    """Return the tables by version; none without a file."""
    try:
        found = _CONTENT.decode(path.read_bytes())
        return {version: np.frombuffer(table, "<f4").copy() for version, table in found.items()}
    except (OSError, ValueError):
        return {}
