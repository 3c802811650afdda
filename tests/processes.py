"""The processes of a running server."""

from __future__ import annotations

from pathlib import Path

READER = b"tlt_server.frontend.reading_process"  # in the command line of the server's other child


def engines(server: int) -> list[int]:
    """Return the pids of the engines that a server's process has started."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    commands = {int(child): _command(child) for child in children}  # empty: it has ended
    return [pid for pid, command in commands.items() if command and READER not in command]


def engine(server: int) -> int:
    """Return the pid of a server's one engine."""
    [pid] = engines(server)
    return pid


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:  # it has just ended
        return b""
