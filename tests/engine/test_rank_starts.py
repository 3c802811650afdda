"""Starts of an engine with several ranks that break off: no process and no directory is left."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.pushing import Pushable
from tests.engine.ranks_of_tests import ROOT
from tests.engine.test_ranks import root, settings
from tests.waiting import until
from tlt_server.engine.exchange.meeting import meeting_folder
from tlt_server.engine.ranks import ranks
from tlt_server.engine.settings import EngineSettings, encode_settings
from tlt_server.errors import EngineFailed

__all__ = ["root", "settings"]  # fixtures
PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture
def adopting() -> Iterator[None]:
    """Make orphans of this process's children its own, so that it sees how each ends."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    yield
    prctl(PR_SET_CHILD_SUBREAPER, 0)


def status_of(pid: str) -> int:
    """Return the status of an adopted process, once it has ended."""
    waited = os.WEXITED | os.WNOWAIT | os.WNOHANG
    until(lambda: os.waitid(os.P_PID, int(pid), waited) is not None)
    return os.waitpid(int(pid), 0)[1]


def test_starting_rank_ends_after_rank_0_is_killed(
    settings: EngineSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adopting: None
) -> None:
    """The only directory left is that of its server, which removes it."""
    temporary, directory = tmp_path / "tmp", tmp_path / "engine"
    for each in (temporary, directory):
        each.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    command = [sys.executable, "-m", "tests.engine.killed_at_launch", str(directory)]
    shared = replace(settings, tensor_parallel=2, parent=os.getpid())
    with (tmp_path / "said").open("w+") as said:  # a rank would keep a pipe open
        subprocess.run(command, input=encode_settings(shared), stdout=said, cwd=ROOT, timeout=60)
        said.seek(0)
        [rank] = said.read().split()
    assert status_of(rank) in (0, signal.SIGKILL), "a rank outlives rank 0"
    assert not [*temporary.glob("tlt-*")], "a directory is left for ever"
    assert (directory / "ranks").is_dir(), "the start had got so far"


LAUNCH = """
import sys, time
from pathlib import Path
from tests.engine.child import start_engine
from tlt_server.engine.settings import decode_settings
print(start_engine(decode_settings(sys.stdin.buffer.readline()), Path(sys.argv[1])).pid, flush=True)
time.sleep(60)
"""


def test_loading_engine_ends_after_its_server_is_killed(
    settings: EngineSettings, tmp_path: Path, adopting: None
) -> None:
    command = [sys.executable, "-c", LAUNCH, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(encode_settings(settings))
        server.stdin.flush()
        engine = server.stdout.readline().decode().strip()
        server.kill()
    assert status_of(engine) in (0, signal.SIGKILL), "it loads on and fails by itself"


def test_rank_ending_before_its_settings_is_named_in_one_error(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended(subprocess.Popen[bytes]):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self.kill()
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    monkeypatch.setattr(ranks.subprocess, "Popen", Ended)
    with pytest.raises(EngineFailed, match=r"rank 1 \(process \d+\) was ended by SIGKILL"):
        Pushable(replace(settings, tensor_parallel=2))


def test_orphaned_rank_ends_without_importing_torch() -> None:
    command = [
        sys.executable,
        "-P",
        "-X",
        "importtime",
        "-m",
        "tlt_server.engine.ranks.rank",
        "0",
        "1",
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        _, imported = process.communicate(timeout=20)
    assert process.returncode == 0 and b"tlt_kernels.parents" in imported
    assert b"torch" not in imported


def test_rank_socket_paths_are_short_and_private(tmp_path: Path) -> None:
    with meeting_folder(tmp_path) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(str(folder / "63")) <= len(str(tmp_path / "commands"))
    assert not folder.exists()
    with meeting_folder(None) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
