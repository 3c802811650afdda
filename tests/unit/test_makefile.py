"""`make test-gpu` and `make bench-gpu`, for one GPU and for two: commands that exist, with flags
that they take, and records named by the width.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tlt_server.bench.arguments import BENCHES

ROOT = Path(__file__).parents[2]
OVER_TWO = ("exact", "decode", "cycle", "starts", "faults", "rollout-http", "weights-ipc")

HANDED_DOWN = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "ARGS", "PYTEST_ARGS", "GPUS")
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def told(target: str, *variables: str) -> list[list[str]]:
    """Return the commands of a target, each as words."""
    make = ("make", "--dry-run", "--no-print-directory", target, *variables)
    # Without what the `make` that runs the tests was given.
    plain = {name: value for name, value in os.environ.items() if name not in HANDED_DOWN}
    said = subprocess.run(
        make, cwd=ROOT, check=True, capture_output=True, text=True, env=plain
    ).stdout
    return [shlex.split(line, comments=True) for line in said.splitlines() if ".venv/bin/" in line]


def benches(commands: list[list[str]]) -> list[argparse.Namespace]:
    """Parse every `tlt bench`; a flag or value that it does not take ends the test."""
    found = []
    for words in commands:
        if words[0].endswith("/tlt"):
            parser = argparse.ArgumentParser(allow_abbrev=False)
            BENCHES[words[2]].add(words[2], parser)
            found.append(parser.parse_args(words[3:], argparse.Namespace(bench=words[2])))
    return found


@pytest.mark.parametrize("gpus", ["1", "2"])
def test_benches_accept_the_flags_of_the_makefile(
    gpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # records go to a folder that exists
    commands = told("bench-gpu", f"GPUS={gpus}", f"HARD={tmp_path}")
    records = [asked.json.name for asked in benches(commands) if asked.json]
    assert len(records) == len(set(records)) > 5, "no record is written over by another"
    assert [words[1:] for words in commands[-2:]] == [
        ["-m", "benchmarks.report"],
        ["-m", "benchmarks.plot"],
    ]


def test_two_gpu_runs_have_their_own_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for variables, middle in (((), ""), (("SHAPE=qwen2.5-32b",), "-qwen2.5-32b")):
        commands = told("bench-gpu", "GPUS=2", *variables)
        written = [word for words in commands for word in words if word.endswith("-gpu.json")]
        names = {f"{name}{middle}-tp2-gpu.json" for name in OVER_TWO}
        names |= {"exchange-gpu.json", "decode-llama-3.1-70b-tp2-gpu.json"}
        assert {Path(word).name for word in written} == names
        over = [asked for asked in benches(commands) if hasattr(asked, "tensor_parallel")]
        assert {asked.tensor_parallel for asked in over} == {2}


def test_two_gpu_tests_are_selected_by_number_of_gpus() -> None:
    for variables, gpus in (((), "1"), (("GPUS=2",), "2")):
        [*_, words] = told("test-gpu", *variables)
        assert words[1:] == ["-m", "benchmarks.record_tests", "--gpus", gpus]
    said = subprocess.run(("make", "help"), cwd=ROOT, check=True, capture_output=True, text=True)
    assert re.findall(r"^(\S+)\t.*GPUS=2", said.stdout, re.M) == ["test-gpu", "bench-gpu"]
