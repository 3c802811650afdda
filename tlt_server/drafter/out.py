"""A directory that appears complete or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tlt_server.errors import StartupError


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a draft directory that becomes `path` at the end; after an error nothing is left.
    `StartupError` if `path` is in use or cannot be created.
    """
    path = path.absolute()  # `.` has no name
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise StartupError(f"{path} exists and is not an empty directory; name another")
    draft = path.with_name(f".{path.name}.part")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        yield draft
        draft.replace(path)
    except OSError as error:
        raise StartupError(f"{path}: cannot be written ({error})") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
