"""`python -m benchmarks.record_starts [--commit NAME] [--json FILE] -- FLAGS OF tlt serve`: measure
how long a server takes to be ready: with a cold cache, a warm one, and one that was copied, as to
another machine (`imported`).

Each start has the phases that the server names, and the rest, which is imports and processes.
Python's bytecode should be there, as after an install: compiling it takes 6 s of each start.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.recording import RESULTS, Served
from tlt_server.bench.micro import require_gpu
from tlt_server.demo.server import ServerProcess
from tlt_server.errors import StartupError

RECORD = RESULTS / "starts-gpu.json"
PHASE = re.compile(r"  (\S.{0,27}?)\s+(\d+\.\d\d) s")
CACHE = "TRITON_CACHE_DIR"


def main(arguments: Sequence[str]) -> int:
    """Return 0, or 2 where a server does not start."""
    served = Served.asked(arguments, __doc__, RECORD)
    try:
        require_gpu()
        with tempfile.TemporaryDirectory() as folder:
            rows = starts(Path(folder), served.flags)
    except StartupError as error:
        print(f"benchmarks.record_starts: {error}", file=sys.stderr)
        return 2
    served.write("benchmarks.record_starts", "starts", rows, on_gpu=True)
    return 0


def starts(folder: Path, flags: Sequence[str]) -> list[dict[str, Any]]:
    """Start one server after the other in an environment that begins empty."""
    first, copied = folder / "first", folder / "copied"
    first.mkdir()
    rows = [start("cold", first, flags), start("warm", first, flags)]
    shutil.copytree(first, copied)
    shutil.rmtree(first)
    copied.rename(first)  # Triton's cache has absolute paths in it
    rows += [start("imported", first, flags), start("imported, again", first, flags)]
    return rows


def start(name: str, directory: Path, flags: Sequence[str]) -> dict[str, Any]:
    """Start a server once; return seconds until it was ready, whole and by phase."""
    phases: dict[str, float] = {}

    def read(line: str) -> None:
        if found := PHASE.match(line):
            phases[found[1]] = float(found[2])

    os.environ[CACHE] = str(directory / "triton")
    began = time.perf_counter()
    with ServerProcess(*flags, "--state-dir", str(directory / "state"), on_line=read):
        ready_s = time.perf_counter() - began
    row = {"start": name, "ready_s": round(ready_s, 2), "phases_s": phases}
    print(row | {"other_s": ready_s - sum(phases.values())}, flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
