"""`tlt bench exchange` without GPUs, and the flags of ranks that benches of a server hand on."""

from __future__ import annotations

import argparse
import queue
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tlt_server.__main__ import main
from tlt_server.bench import exchange
from tlt_server.bench.arguments import BENCHES
from tlt_server.bench.exchange import measured
from tlt_server.bench.settings import asked_words
from tlt_server.engine.exchange.meeting import Meeting
from tlt_server.models.environment import NO_MULTICAST

ROW = {"what": "signal", "us": 1.5}
SAY = "import json, os, sys, time; rank = int(sys.argv[2])\n"
REPORT = f"if rank == 0: print(json.dumps([{ROW}]), flush=True)\n"


def command(script: str) -> list[str]:
    return [sys.executable, "-c", SAY + script]


def test_all_sections_report_rows_without_multicast() -> None:
    checks = "".join(f"assert os.environ[{k!r}] == {v!r}\n" for k, v in NO_MULTICAST.items())
    assert measured(command(checks + REPORT + REPORT)) == ([ROW, ROW], "")


class OncePatient(queue.Queue[Any]):
    """Waits for the first message however long the ranks take to start."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        first, self.patient = getattr(self, "patient", True), False
        return super().get(timeout=None if first else timeout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "silent_s", "reason"),
    [
        (
            "import pathlib; shown = pathlib.Path('SHOWN')\n"
            "while rank == 0 or not shown.exists(): time.sleep(0.01)\n"
            "sys.exit(3)",
            600.0,
            "rank 1 ended with status 3",
        ),
        ("time.sleep(600)", 0.3, "no rank has said anything for 0.3 s"),
    ],
)
def test_reported_rows_are_kept_after_a_failure(
    script: str, silent_s: float, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    show = exchange._shown

    def shown(line: str) -> Any:
        (tmp_path / "shown").touch()
        return show(line)

    monkeypatch.setattr(exchange, "_shown", shown)
    monkeypatch.setattr(exchange, "queue", SimpleNamespace(Queue=OncePatient, Empty=queue.Empty))
    script = script.replace("SHOWN", str(tmp_path / "shown"))
    rows, missing = measured(command(REPORT + script), silent_s=silent_s)
    assert rows == [ROW] and missing.startswith(reason)


def test_absent_rank_is_named(tmp_path: Path) -> None:
    (tmp_path / "grants.1").write_bytes(b"one")
    assert Meeting(tmp_path, 0, 2, 60).told("grants", b"zero") == [b"zero", b"one"]
    with pytest.raises(TimeoutError, match="rank 1 did not arrive at 'windows' within 0.1 s"):
        Meeting(tmp_path, 0, 2, 0.1).told("windows")


ASKED = {
    "--tensor-parallel": "2",
    "--reduction-leaves": "4",
    "--exchange": "nccl",
    "--drafter-parallel": "replicated",
}
WORDS = [word for pair in ASKED.items() for word in pair]


@pytest.mark.parametrize("bench", ["rollout", "weights"])
def test_server_of_several_ranks_gets_the_flags_of_ranks(bench: str) -> None:
    parser = argparse.ArgumentParser()
    BENCHES[bench].add(bench, parser)
    assert asked_words(parser.parse_args([])) == []
    assert asked_words(parser.parse_args(WORDS)) == WORDS


@pytest.mark.parametrize("flag", ASKED)
def test_cpu_push_bench_gets_no_flag_of_ranks(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "weights", flag, ASKED[flag]]) == 2
    assert f"{flag} is for --device cuda: leave it out" in capsys.readouterr().err
