"""The processes of a running server."""

from __future__ import annotations

from pathlib import Path

ENGINES = (b"tlt_server.engine.process", b"fake_engine.py")  # in their command lines


def engines(server: int) -> list[int]:
    """Return the pids of the engines that a server's process has started."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return [int(child) for child in children if any(name in _command(child) for name in ENGINES)]


def engine(server: int) -> int:
    """Return the pid of a server's one engine."""
    [pid] = engines(server)
    return pid


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:  # it has just ended
        return b""
