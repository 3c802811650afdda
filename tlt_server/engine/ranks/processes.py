"""The end of the processes of further ranks: of one by itself, and of all where an engine ends in
order. A server kills an engine that has failed, and the system ends its ranks with it (`rank.py`).
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
    """`EngineFailed` where a rank has ended. `left`: a connection to one has just broken, so it may
    be about to end.
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
    """Kill the processes of ranks 1 and on, and wait until they have ended, for a bounded time: one
    that waits for a driver may be deaf. A line on stderr names each that is left.
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
