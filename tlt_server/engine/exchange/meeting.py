"""A folder in which the ranks of one host meet: each writes bytes under a name and reads those of
all.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tlt_server.errors import EngineFailed
from tlt_server.process.private import private_directory

POLL_S = 0.001
FOLDER = "ranks"  # short: sockets in it have paths of 107 bytes at most


@contextmanager
def meeting_folder(within: Path | None) -> Iterator[Path]:
    """Yield a new private folder, removed at the end. A killed process leaves it to the process
    that owns `within`. None: use the system's temporary directory.
    """
    if within is None:
        with tempfile.TemporaryDirectory(prefix="tlt-") as name:
            yield Path(name)
        return
    folder = private_directory(within / FOLDER)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Meeting(NamedTuple):
    folder: Path
    rank: int
    ranks: int
    timeout_s: float
    check: Callable[[], None] = lambda: None  # `EngineFailed` ends the wait, as at a rank's death

    def told(self, name: str, data: bytes = b"") -> list[bytes]:
        """Wait for all ranks, and return their messages in rank order. Each name is used once.
        `TimeoutError` names the missing rank.
        """
        written = self.folder / f"{name}.{self.rank}.part"
        written.write_bytes(data)
        written.rename(written.with_suffix(""))
        end = time.monotonic() + self.timeout_s
        found = []
        for rank in range(self.ranks):
            file = self.folder / f"{name}.{rank}"
            while not file.exists():
                try:
                    self.check()
                except EngineFailed:
                    if file.exists():
                        break  # the rank ended after this meeting, to which all have come
                    raise
                if time.monotonic() > end:
                    raise TimeoutError(
                        f"rank {rank} did not arrive at {name!r} within {self.timeout_s:g} s"
                    )
                time.sleep(POLL_S)
            found.append(file.read_bytes())
        return found
