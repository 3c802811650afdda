"""`python -m tests.again` over tiny projects: what a second run excuses, what fails at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.durations import by_file

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
INI = "[pytest]\naddopts = -q --import-mode=importlib -p xdist.plugin --max-worker-restart=0\n"
HEAD = """
import os
from pathlib import Path

import pytest


def tried(name):
    path = Path(f"tries-{name}")
    before = int(path.read_text()) if path.exists() else 0
    path.write_text(str(before + 1))
    return before


def test_passes():
    assert tried("passes") == 0, "what passed does not run again"


def test_flaky():
    assert tried("flaky")
"""
STRANGE = ("plain", "a b", "[x]{y}", "x::y", "line\nbreak", "$(ls) 'it' \"is\" é", "-x", "a,b or c")


class Ended(NamedTuple):
    status: int
    said: list[str]  # lines of the summary
    ran_again: bool


def ended(folder: Path, source: str, arguments: Sequence[str] = ()) -> Ended:
    """Run a project of one file."""
    (folder / "pytest.ini").write_text(INI)
    (folder / "test_it.py").write_text(HEAD + source)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.again", *arguments],
        cwd=folder,
        env=plain | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = [line for line in ran.stdout.splitlines() if line.startswith(("flaky", "failed twice"))]
    return Ended(ran.returncode, said, (folder / "build" / "tests-again.json").exists())


@pytest.mark.parametrize("workers", ["0", "2"])
def test_flaky_tests_of_any_name_do_not_fail_the_run(tmp_path: Path, workers: str) -> None:
    strange = f"""
NAMES = {STRANGE!r}

@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_strange(index):
    assert tried(index)

@pytest.fixture
def late():
    yield
    assert tried("late")

def test_ends_late(late):
    assert True
"""
    status, said, _ = ended(tmp_path, strange, ["-n", workers])
    assert status == 0
    assert len({*said}) == len(said) == len(STRANGE) + 2
    assert {"flaky: test_it.py::test_flaky", "flaky: test_it.py::test_strange[[x]{y}]"} < {*said}
    record = json.loads((tmp_path / "build" / "tests.json").read_text())
    assert record["outcomes"].pop("test_it.py::test_passes") == "passed"
    assert {*record["outcomes"].values()} == {"failed"}
    assert by_file(record["seconds"]).keys() == {"test_it.py"}


def test_only_a_pass_excuses_a_failure(tmp_path: Path) -> None:
    twice = """
def test_fails():
    assert False

def test_skips_later():
    if tried("skips"):
        pytest.skip("not here")
    assert False
"""
    status, said, _ = ended(tmp_path, twice)
    assert status == 1
    assert said == [
        "flaky: test_it.py::test_flaky",
        "failed twice: test_it.py::test_fails",
        "failed twice: test_it.py::test_skips_later",
    ]


def test_crash_of_the_second_run_excuses_no_failure(tmp_path: Path) -> None:
    crash = "def test_ends():\n    if tried('ends'):\n        os._exit(0)\n    assert False\n"
    status, said, _ = ended(tmp_path, crash)
    assert status == 1
    assert [line.partition(":")[0] for line in said] == ["failed twice"] * 2


@pytest.mark.parametrize(
    ("source", "arguments", "status"),
    [
        ("def test_ends():\n    os._exit(0)\n", ("-n", "2"), 1),
        ("assert False\n", ("--continue-on-collection-errors",), 1),
        ("assert False\n", ("-n", "1"), 1),
        ("def test_interrupts():\n    raise KeyboardInterrupt\n", (), 2),
        ("@pytest.mark.parametrize('n', range(10))\ndef test_n(n):\n    assert tried(n)\n", (), 1),
        ("def test_left_out():\n    pass\n", ("-x",), 1),
    ],
    ids=["crash", "collection", "collection of a worker", "interrupt", "eleven", "stopped"],
)
def test_broken_run_fails_without_a_second_run(
    tmp_path: Path, source: str, arguments: tuple[str, ...], status: int
) -> None:
    if "assert False" in source:
        (tmp_path / "test_broken.py").write_text(source)
        source = ""
    came = ended(tmp_path, source, arguments)
    assert came == Ended(status, [], False)


def test_passing_tests_are_not_run_twice(tmp_path: Path) -> None:
    assert ended(tmp_path, "", ["-k", "passes"]) == Ended(0, [], False)
    assert ended(tmp_path, "", ["-k", "nothing"]) == Ended(5, [], False)
    assert json.loads((tmp_path / "build" / "tests.json").read_text())["outcomes"] == {}


def test_test_seconds_add_up_by_file() -> None:
    assert by_file({"a.py::x": 1.0, "b.py::y[a::b]": 2.0, "a.py::z": 0.5}) == {
        "a.py": 1.5,
        "b.py": 2.0,
    }
