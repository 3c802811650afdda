"""The calibration tables by which recorded trees were grown, by version: a file next to the ring
that the engine writes and the trainer process reads. The newest KEPT tables are in it, so a tree
that is older cannot be drafted again.

A table's version is that of its drafter with a digest of the table. The file is written whole, or
not at all.
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
    """Return the path of the tables that belong to a ring of sequences."""
    return ring.with_name(f"{ring.name}-{NAME}")


def drafter_of(version: str) -> str:
    """Return the version of a table's drafter; some records name a drafter alone."""
    drafter, mark, _ = version.rpartition(MARK)
    return drafter if mark else version


class TableFile:
    """The tables of an engine, and the file. A failure to write leaves the file as it was: trees
    are then not compared.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # The newest last, with those of an engine before.
        self._kept = {version: table.tobytes() for version, table in read_tables(path).items()}

    def add(self, drafter: str, acceptance_K: NDArray[np.float32]) -> str:
        """Keep a table, and return its version."""
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
    """Return the tables by version; an empty result if there is no such file."""
    try:
        found = _CONTENT.decode(path.read_bytes())
        return {version: np.frombuffer(table, "<f4").copy() for version, table in found.items()}
    except (OSError, ValueError):
        return {}
