"""An engine's process that is killed just after it has launched its other ranks, whose pids it
prints: `python -m tests.engine.killed_at_launch DIR`.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from tlt_server.engine.process import main
from tlt_server.engine.ranks.ranks import Ranks


def killed(ranks: Ranks[Any], what: str) -> None:
    print(*(process.pid for process in ranks._processes), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    Ranks._met = killed  # type: ignore[method-assign]
    main()
