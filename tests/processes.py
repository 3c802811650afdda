"""The processes of a running server, and commands that a test runs."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# In the command lines of the server's other children.
READER = b"tlt_server.frontend.reading_process"
TRAINER = b"tlt_server.trainer.process.main"


def engines(server: int) -> list[int]:
    """Return the pids of the engines that a server's process has started."""
    others = (READER, TRAINER)
    return [
        pid
        for pid, command in _children(server).items()
        if command and not any(other in command for other in others)
    ]


def trainer(server: int) -> int:
    """Return the pid of a server's trainer process."""
    [pid] = [pid for pid, command in _children(server).items() if TRAINER in command]
    return pid


def _children(server: int) -> dict[int, bytes]:
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return {int(child): command(child) for child in children}  # empty: it has ended


def engine(server: int) -> int:
    """Return the pid of a server's one engine."""
    [pid] = engines(server)
    return pid


def command(pid: str) -> bytes:
    """Return a process's command line, empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:  # it has just ended
        return b""


def ranks(engine: int) -> list[int]:
    """Return the pids of the processes with which an engine shares its target."""
    return [pid for pid, command in _children(engine).items() if b"engine.rank" in command]


def descendants(ancestor: int, word: bytes) -> list[int]:
    """Return the pids of the processes below one whose command lines hold a word."""
    found = []
    for pid, line in _children(ancestor).items():
        found += [pid] * (word in line) + descendants(pid, word)
    return found


def completed(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command for at most five minutes; return its exit status and what it printed."""
    return subprocess.run(command, capture_output=True, text=True, **{"timeout": 300} | options)
