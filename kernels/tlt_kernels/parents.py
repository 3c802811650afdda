"""The bond of a process to the one that started it. The standard library only, for a process that
has yet to import what takes seconds.

`python -m tlt_kernels.parents PID COMMAND...` binds itself and then becomes any command.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def end_with(parent: int, *, by: signal.Signals = signal.SIGKILL) -> None:
    """End this process when the thread that started it ends, or that thread's process `parent`; at
    once if it has. A fork has to bind itself.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        os._exit(0)


def bound(command: Sequence[str]) -> list[str]:
    """Return the command as one that is asked to end (SIGTERM) when the thread that starts it, or
    this process, has ended.
    """
    return [sys.executable, "-P", "-m", "tlt_kernels.parents", str(os.getpid()), *command]


if __name__ == "__main__":
    parent, *command = sys.argv[1:]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a caller may ignore or block it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    end_with(int(parent), by=signal.SIGTERM)
    os.execvp(command[0], command)
