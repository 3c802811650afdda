"""The bond of a process to the one that started it. The standard library only, for a process that
has yet to import what takes seconds.
"""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """End this process when the thread that started it ends, or that thread's process `parent`; at
    once if it has. A fork has to bind itself.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
