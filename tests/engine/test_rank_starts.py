"""Starts of an engine with several ranks that break off: no process and no directory is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests import processes
from tests.engine.ranks_of_tests import ROOT
from tests.engine.test_ranks import root, settings
from tlt_server.engine.exchange.meeting import meeting_folder
from tlt_server.engine.settings import EngineSettings, encode_settings

__all__ = ["root", "settings"]  # fixtures


def test_a_rank_ends_at_once_with_a_rank_0_that_is_killed_as_it_starts(
    settings: EngineSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    ended_s = time.monotonic() + 3
    while processes.command(rank) and time.monotonic() < ended_s:
        time.sleep(0.02)
    assert not processes.command(rank), "a rank outlives rank 0"
    assert not [*temporary.glob("tlt-*")], "a directory is left for ever"
    assert (directory / "ranks").is_dir(), "the start had got so far"


def test_a_rank_whose_parent_has_ended_imports_nothing() -> None:
    began_s = time.monotonic()
    command = [sys.executable, "-P", "-m", "tlt_server.engine.rank", "0", "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.wait(5) == 0, "it waits for its first line"
    assert time.monotonic() - began_s < 1


def test_sockets_of_ranks_have_no_longer_paths_than_those_of_the_engine(tmp_path: Path) -> None:
    with meeting_folder(tmp_path) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(str(folder / "63")) <= len(str(tmp_path / "commands"))
    assert not folder.exists()
    with meeting_folder(None) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
