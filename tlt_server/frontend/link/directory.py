"""The server's directory of sockets and started files, below the temporary one, for as long as it
runs.

A living server holds a lock on the file `lock` in it. The kernel lets go of the lock with the
process, however that ends, so a lock that can be taken shows that the directory's server is dead:
the next server of the same user removes it. Process ids would say less, since containers share
temporary directories and not ids.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import structlog

from tlt_server.process.private import DIRECTORY, private_file

PREFIX, LOCK = "tlt-", "lock"

log = structlog.get_logger()


@contextlib.contextmanager
def own_directory() -> Iterator[Path]:
    """Yield a new directory of mode 0700 that is removed at the end. Remove those of dead servers
    first.
    """
    sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        os.chmod(name, DIRECTORY)  # under any umask
        lock = private_file(Path(name) / "locking", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(Path(name) / "locking", Path(name) / LOCK)  # never there without its lock
            yield Path(name)
        finally:
            os.close(lock)


def sweep(temporary: Path) -> None:
    """Remove this user's directories whose lock no process holds. No link is followed."""
    for directory in temporary.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if _is_dead(directory):
                shutil.rmtree(directory)
                log.info("directory_of_a_dead_server_removed", directory=str(directory))


def _is_dead(directory: Path) -> bool:
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return False
    lock = os.open(directory / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
