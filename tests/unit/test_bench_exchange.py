"""`tlt bench exchange` without GPUs: what ranks report is kept when one fails or is silent."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tlt_server.bench.exchange import measured
from tlt_server.engine.exchange.meeting import Meeting
from tlt_server.models.environment import NO_MULTICAST

ROW = {"what": "signal", "us": 1.5}
SAY = "import json, os, sys, time; rank = int(sys.argv[2])\n"
REPORT = f"if rank == 0: print(json.dumps([{ROW}]), flush=True)\n"


def command(script: str) -> list[str]:
    return [sys.executable, "-c", SAY + script]


def test_rows_of_all_sections_and_an_environment_without_multicast() -> None:
    checks = "".join(f"assert os.environ[{k!r}] == {v!r}\n" for k, v in NO_MULTICAST.items())
    assert measured(command(checks + REPORT + REPORT)) == ([ROW, ROW], "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("time.sleep(60 if rank == 0 else 0.5); sys.exit(3)", "rank 1 ended with status 3"),
        ("time.sleep(60)", "no rank has said anything for 2 s"),
    ],
)
def test_what_is_there_is_kept(script: str, reason: str) -> None:
    rows, missing = measured(command(REPORT + script), silent_s=2.0)
    assert rows == [ROW] and missing.startswith(reason)


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    (tmp_path / "grants.1").write_bytes(b"one")
    assert Meeting(tmp_path, 0, 2, 0.1).told("grants", b"zero") == [b"zero", b"one"]
    with pytest.raises(TimeoutError, match="rank 1 did not come to 'windows' in 0.1 s"):
        Meeting(tmp_path, 0, 2, 0.1).told("windows")
