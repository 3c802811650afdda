"""Runs a command as the only one of its directory: `python -m ... DIRECTORY COMMAND...` takes the
directory's lock, ends the process that holds it first, and becomes the command.

A server that has outlived its launcher keeps GPU and ports. The lock belongs to a process and lasts
over `exec`, so the kernel names its owner and frees it with that process, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tlt_server.process.private import private_file

LOCK = "replica.lock"
END_S = 30.0  # until a killed owner has left: a driver may take seconds to free a GPU
POLL_S = 0.05
# `struct flock` of Linux on 64 bits: type, whence, start, length, owner.
FLOCK = "hhqqi4x"


def alone(directory: Path, command: Sequence[str]) -> list[str]:
    """Return a command that runs another one as the only one of a directory."""
    return [sys.executable, "-P", "-m", __spec__.name, str(directory), *command]


def take(descriptor: int, directory: str) -> None:
    """Take the lock. End an owner that runs for this directory; exit with 1 if it stays."""
    deadline_s = time.monotonic() + END_S
    while True:
        try:
            return fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = _owner(descriptor)
            if time.monotonic() > deadline_s:
                sys.exit(
                    f"tlt: {directory}/{LOCK} is held by process {owner or 'of another machine'} "
                    f"({error.strerror}); end that server, or name another --state-dir"
                )
        if owner and os.fsencode(directory) in _command_line(owner):
            with contextlib.suppress(ProcessLookupError):
                os.kill(owner, signal.SIGKILL)
        time.sleep(POLL_S)


def _owner(descriptor: int) -> int:
    """Return the pid that holds the lock; 0 if it is free, or not of this machine."""
    asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = struct.unpack(FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    return max(pid, 0) if kind != fcntl.F_UNLCK else 0


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""


if __name__ == "__main__":
    directory, *command = sys.argv[1:]
    descriptor = private_file(Path(directory) / LOCK, os.O_RDWR | os.O_CREAT)
    take(descriptor, directory)
    os.set_inheritable(descriptor, True)
    os.execvp(command[0], command)
