"""Detects dead worker ranks, and kills all at an orderly end. The server kills a failed engine, and
the system ends its ranks with it (`rank.py`).
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

from tlt_server.errors import EngineFailed
from tlt_server.process.faults import exit_of

END_S = 10.0  # for all killed processes, which give back the memory of their GPUs
LEAVE_S = 1.0  # from a closed connection to the end of its process
POLL_S = 0.01


def check(processes: Sequence[subprocess.Popen[bytes]], *, left: bool = False) -> None:
    """Raise `EngineFailed` if a rank has died. `left`: a connection to a rank has just broken, so
    its process may be about to end.
    """
    until_s = time.monotonic() + (LEAVE_S if left else 0.0)
    while True:
        for rank, process in enumerate(processes, 1):
            if process.poll() is not None:
                raise EngineFailed(
                    f"rank {rank} (process {process.pid}) {exit_of(process.returncode)}; "
                    "its last lines are on stderr"
                )
        if time.monotonic() >= until_s:
            return
        time.sleep(POLL_S)


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill the processes of ranks 1 and up and wait for their end, for a bounded time: a process in
    a driver call may not react. A line on stderr names each one still alive.
    """
    for process in processes:
        process.kill()
    until_s = time.monotonic() + END_S
    for rank, process in enumerate(processes, 1):
        try:
            process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            print(
                f"tlt: rank {rank} (process {process.pid}) was killed and is left after "
                f"{END_S:g} s; its GPU may be busy until it ends",
                file=sys.stderr,
            )
