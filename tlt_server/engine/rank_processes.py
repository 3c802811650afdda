"""The end of the processes of further ranks, where an engine ends in order. A server kills one that
has failed, and the system ends its ranks with it (`rank.py`).
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

END_S = 10.0  # for all killed processes, which give back the memory of their GPUs


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
