"""The record of the long tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.record import counts, main, suites
from benchmarks.sections.service import soak

REPORT = """<testsuites><testsuite>
<testcase classname="tests.e2e.test_soak" name="test_a[1]" time="3.2"><properties>
<property name="counted" value='{"kill": 7, "http 200": 5}'/></properties></testcase>
<testcase classname="tests.e2e.test_soak" name="test_a[2]" time="2"><properties>
<property name="counted" value='{"kill": 6}'/></properties><failure/></testcase>
<testcase classname="tests.e2e.test_bench" name="test_b" time="1"><skipped/></testcase>
</testsuite></testsuites>"""


def test_soak_record_sums_its_loads_and_is_red_if_a_test_is(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    assert counts("soak", suites(tmp_path / "report.xml")) == {
        "bench": "soak",
        "green": False,
        "files": {
            "tests/e2e/test_bench.py": {"seconds": 1, "skipped": 1},
            "tests/e2e/test_soak.py": {"failed": 1, "passed": 1, "seconds": 5},
        },
        "storms": {"http 200": 5, "kill": 13},
    }
    (tmp_path / "report.xml").write_text(REPORT.replace("<failure/>", ""))
    assert counts("soak", suites(tmp_path / "report.xml"))["green"]


def test_kill_record_reports_how_requests_ended() -> None:
    ends = {"kill under load": 50, "end completed": 900, "end engine_failed": 70}
    files = {"tests/e2e/test_crashes.py": {"passed": 1, "seconds": 9}}
    found = {"files": files, "storms": ends}
    told, failed = soak(found)
    assert told == (
        "50 kills of the engine or one of its ranks under load: 970 requests, each with one end, "
        "900 with the tokens of an undisturbed run, 70 with `engine_failed`."
    )
    assert failed == ("Tests that failed: 0. Their seconds by file, 9 in all, are in the file.")
    told, _ = soak(found | {"storms": {"kill under load": 1, "end completed": 9}})
    assert told.endswith(
        ": 9 requests, each with one end, 9 with the tokens of an undisturbed run."
    )


@pytest.mark.parametrize("mark", ["long", "soak"])
def test_partial_run_does_not_replace_the_full_soak_record(
    mark: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([mark, "tests/unit/test_soak_record.py"]) == 2
    told = capsys.readouterr().err
    assert f"the record of all tests marked {mark}; name another by --json" in told
