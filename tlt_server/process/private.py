"""Files and directories that only the server's user may open, under any umask, and no core files.

The umask of the shell that starts the server could open them to others, or lock the server out.
Everything below the state directory and the server's temporary directories is made here.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

DIRECTORY, FILE = 0o700, 0o600


def write_no_core_files() -> None:
    """Keep this process, and those that it starts, from writing core files, which would contain
    prompts and keys. `prlimit --core=unlimited --pid` allows them again.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def private_directory(path: Path, *, parents: bool = False, exist_ok: bool = False) -> Path:
    """Create a directory, as `Path.mkdir` does. An existing one keeps its mode."""
    if parents and not path.parent.exists():
        private_directory(path.parent, parents=True, exist_ok=True)
    try:
        path.mkdir()
    except FileExistsError:
        if not exist_ok or not path.is_dir():
            raise
    else:
        path.chmod(DIRECTORY)
    return path


def private_file(path: str | Path, flags: int) -> int:
    """Open a private file, created if `flags` say so; an `opener` for `open`."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, FILE)
    try:
        os.fchmod(descriptor, FILE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def replace_file(path: Path, data: bytes) -> None:
    """Replace a private file by one rename, all of which a power failure after this leaves."""
    unfinished = path.with_suffix(".unfinished")
    with open(unfinished, "wb", opener=private_file) as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    unfinished.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
