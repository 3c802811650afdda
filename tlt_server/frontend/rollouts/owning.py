"""The lock by which one process owns a state directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from tlt_server.errors import StartupError
from tlt_server.process.private import private_directory, private_file


@contextlib.contextmanager
def owned(state_dir: Path) -> Iterator[Path]:
    """Yield the directory of rollouts, whose lock makes all of the state directory this process's.
    `StartupError` if another process holds it; hold it before anything there is changed.
    """
    directory = state_dir / "rollouts"
    try:
        private_directory(directory, parents=True, exist_ok=True)
        lock = private_file(directory / "lock", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise unusable(directory, error) from None
    try:
        _take_lock(lock, directory)
        yield directory
    finally:
        os.close(lock)


def _take_lock(lock: int, directory: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StartupError(
            f"{directory} is in use by another server; name another --state-dir, or stop that one"
        ) from None
    except OSError as error:
        raise unusable(directory, error) from None


def unusable(directory: Path, error: OSError) -> StartupError:
    """Return the error of a directory that rollouts cannot be kept in."""
    return StartupError(
        f"rollouts cannot be kept in {directory} ({error.strerror}); name another --state-dir"
    )
