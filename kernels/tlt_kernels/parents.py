"""Binds a process to its parent. Uses only the standard library, for a process that has not yet
imported anything slow.

`python -m tlt_kernels.parents PID COMMAND...` binds itself and then becomes the command.
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
    once if it has ended. A fork must call this again.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        os._exit(0)


def bound(command: Sequence[str]) -> list[str]:
    """Return a command that gets SIGTERM when the thread that starts it, or this process, ends."""
    return [sys.executable, "-P", "-m", "tlt_kernels.parents", str(os.getpid()), *command]


if __name__ == "__main__":
    parent, *command = sys.argv[1:]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a caller may ignore or block it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    end_with(int(parent), by=signal.SIGTERM)
    os.execvp(command[0], command)
