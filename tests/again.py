"""`python -m tests.again [ARGUMENTS OF PYTEST]`: run tests, and run those that failed once more.

A test that fails among the others and passes by itself is printed as `flaky: NAME` and does not
fail the run; a test that fails twice does. Failures are final at once if the run does not end
normally (an error of collection, a crash of a worker, `-x`, an interrupt), or if more than
`LIMIT` tests failed. The second run is one new process without workers.

The outcome and seconds of every test of the first run are in `RECORD`; tests/durations.py adds
them up by file.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

RECORD = Path("build/tests.json")
AGAIN = Path("build/tests-again.json")  # names to run again, then how each of them ended
ONLY = "--only-what-failed"
LIMIT = 10  # more failures have one cause, which is not the load


class Record:
    """A plugin of pytest's main process that keeps how each test ended and what it took."""

    def __init__(self, only: Collection[str] = ()) -> None:
        self.only = only  # names of tests; empty: all
        self.outcomes: dict[str, str] = {}
        self.seconds: Counter[str] = Counter()
        self.complete = True

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.only:
            items[:] = [item for item in items if item.nodeid in self.only]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.complete &= not report.failed

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, error: object) -> None:
        self.complete &= error is None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed and self.outcomes.get(report.nodeid) != "failed":
            self.outcomes[report.nodeid] = report.outcome
        self.outcomes.setdefault(report.nodeid, "passed")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.complete &= len(self.outcomes) == session.testscollected

    def named(self, outcome: str) -> list[str]:
        return [name for name, ended in self.outcomes.items() if ended == outcome]


def main(arguments: Sequence[str]) -> int:
    """Return pytest's exit status, and 0 if only flaky tests failed."""
    if [*arguments] == [ONLY]:
        return run_failed()
    record = Record()
    status = int(pytest.main([*arguments], plugins=[record]))
    write(RECORD, {"outcomes": record.outcomes, "seconds": record.seconds})
    failed = record.named("failed")
    if status != pytest.ExitCode.TESTS_FAILED or not record.complete:
        return status
    if not 0 < len(failed) <= LIMIT:
        return status
    print(f"\nAgain, by themselves: {len(failed)} of {len(record.outcomes)} tests.", flush=True)
    write(AGAIN, {"failed": failed})
    # Of what the first run was asked for, the names say all that counts.
    again = subprocess.run([sys.executable, "-m", "tests.again", ONLY])
    passed = json.loads(AGAIN.read_text()).get("passed", [])  # absent: the run crashed
    print()  # a run that crashed has left its line open
    for name in failed:
        print(f"{'flaky' if name in passed else 'failed twice'}: {name}")
    return 0 if again.returncode == 0 and {*failed} == {*passed} else status


def run_failed() -> int:
    """Run the tests that `AGAIN` names, and write which of them pass."""
    failed = json.loads(AGAIN.read_text())["failed"]
    record = Record(only={*failed})
    files = dict.fromkeys(name.partition("::")[0] for name in failed)
    status = int(pytest.main(["-n", "0", *files], plugins=[record]))
    write(AGAIN, {"failed": failed, "passed": record.named("passed")})
    return status


def write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
