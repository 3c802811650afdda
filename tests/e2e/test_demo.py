"""`tlt demo --quick`, as anyone would run it, from a directory that is not the checkout."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import completed
from tlt_client import Client


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSAFEPATH": "1"}


def test_quick_demo_prints_its_table_with_the_same_tokens(tmp_path: Path) -> None:
    done = completed(
        [
            sys.executable,
            "-m",
            "tlt_server",
            "demo",
            "--quick",
            "--json",
            str(tmp_path / "figures.json"),
        ],
        cwd=tmp_path,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    for part in (
        "load model",
        "identical",
        "eagle",
        "history",
        "goodput",
        "p50/p90/p99/max",
        "curl -sN",
    ):
        assert part in done.stdout
    figures = json.loads((tmp_path / "figures.json").read_text())
    push, rounds = figures["push"], figures["rounds"]
    assert push["sound"] and push["crossing"] > 0 and push["pause_ms"] < 1000
    assert "step-1 [" in done.stdout
    assert [turn["name"] for turn in rounds] == ["off", "eagle", "history", "goodput"]
    assert all(
        turn["responses_differing"] == 0 and turn["reward"] == rounds[0]["reward"]
        for turn in rounds
    )
    assert rounds[0]["accept_length"] is None and rounds[1]["accept_length"] > 1
    assert rounds[1]["passes"] < rounds[0]["passes"]


@pytest.mark.parametrize("when", ["listening on", pytest.param("off: ", marks=pytest.mark.long)])
def test_an_interrupted_demo_stops_its_server(when: str, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tlt_server", "demo"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as demo:
        assert demo.stdout is not None
        said = ""
        while when not in said:
            said += demo.stdout.readline()
        demo.send_signal(signal.SIGINT)
        assert demo.wait(90) == 130
    url = re.search(r"listening on (\S+);", said)
    assert url is not None and not Client(url[1]).is_ready()
