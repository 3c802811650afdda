"""Directories of dead servers are swept at the next start, and nothing else is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tlt_server.frontend.link.link import LOCK, own_directory, sweep

DIES = """
import os
from tlt_server.frontend.link.link import own_directory
with own_directory() as directory:
    (directory / "1").mkdir()
    (directory / "1" / "commands").touch()
    print(directory, flush=True)
    os._exit(9)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_only_directories_of_dead_servers_are_swept(temporary: Path) -> None:
    died = subprocess.run(
        [sys.executable, "-c", DIES], stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    dead = Path(died.stdout.strip())
    assert (dead / "1" / "commands").exists() and dead.parent == temporary
    with own_directory() as living:
        assert not dead.exists() and living.stat().st_mode & 0o777 == 0o700
        with own_directory() as other:
            assert living.exists() and other != living
        assert list(temporary.iterdir()) == [living]
    assert not living.exists()


def test_links_files_and_unlocked_directories_are_not_swept(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = temporary / "kept"
    outside.mkdir()
    (outside / LOCK).touch()
    (temporary / "tlt-link").symlink_to(outside)
    (temporary / "tlt-file").touch()
    (temporary / "tlt-unlocked").mkdir()
    linked = temporary / "tlt-linked"
    linked.mkdir()
    (linked / LOCK).symlink_to(outside / LOCK)
    foreign = temporary / "tlt-foreign"
    foreign.mkdir()
    (foreign / LOCK).touch()
    before = sorted(temporary.rglob("*"))
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    sweep(temporary)
    assert sorted(temporary.rglob("*")) == before
    monkeypatch.setattr(os, "geteuid", lambda: user)
    sweep(temporary)
    assert [path for path in before if not path.exists()] == [foreign, foreign / LOCK]
    assert (temporary / "tlt-link").is_symlink()
