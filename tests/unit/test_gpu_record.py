"""The record of GPU tests: parts that ran on one machine and commit make one record."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree.ElementTree import Element, fromstring

import pytest
from msgspec import convert
from msgspec.structs import asdict, replace

from benchmarks import record_tests
from benchmarks.record import suites
from benchmarks.record_tests import EXACT, GOLDEN, PLANS, counts, figures, moved, recorded
from tlt_kernels import versions
from tlt_server.bench.record import write_entry
from tlt_server.wire.fingerprint import Fingerprint

ONE_PASSED = (
    '<testsuites><testsuite time="1"><testcase classname="t" name="a" /></testsuite></testsuites>'
)
TEST_REPORT = """\
<testsuites><testsuite time="3.25">
<testcase classname="t" name="a" />
<testcase classname="t" name="c"><failure /></testcase>
<testcase classname="t" name="c"><error /></testcase>
<testcase classname="t" name="b"><error /></testcase>
<testcase classname="t" name="d"><skipped /></testcase>
</testsuite></testsuites>"""  # c failed twice: in the call and in its teardown
PASSED = {"passed": 5, "failed": 0, "skipped": 0, "seconds": 2.0}
ONE, TWO = PLANS[1], PLANS[2]
ALL_PASSED = dict.fromkeys(ONE.parts, PASSED)
SAME_BITS = {"requests": 612, "differing_tokens": 0, "differing_logprob_bits": 0}


def test_record_counts_the_outcomes_of_a_test_run(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    assert counts(suites(report), -9)["red"] == ["the run, which ended with status -9"]
    report.write_text(TEST_REPORT[:100])
    assert counts(suites(report), 3)["failed"] == 1, "a run that never finished is red"
    report.write_text(TEST_REPORT)
    assert counts(suites(report), 1) == {
        "passed": 1,
        "failed": 2,
        "skipped": 1,
        "seconds": 3.2,
        "red": ["t::b", "t::c"],
    }
    report.write_text(ONE_PASSED)
    assert counts(suites(report), 0)["failed"] == 0
    assert counts(suites(report), 2)["failed"] == 1, "interrupted before a test failed"


def test_a_record_is_green_once_every_part_has_passed() -> None:
    first = ONE.parts[0]
    assert figures(ONE, ALL_PASSED, SAME_BITS)["green"]
    for part in ALL_PASSED:
        assert not figures(
            ONE, {name: came for name, came in ALL_PASSED.items() if name != part}, SAME_BITS
        )["green"]
    for came in (PASSED | {"failed": 1}, PASSED | {"passed": 0}):
        assert not figures(ONE, ALL_PASSED | {first: came}, SAME_BITS)["green"]


def test_parts_join_the_record_of_the_same_code_and_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_tests, "RESULTS", tmp_path)
    entry = {
        "commit": "abc1234",
        "machine": "1 x NVIDIA H200; 16 cores of a host",
        "versions": {"torch": "2.11.0"},
    }
    assert recorded(ONE, entry) == ({}, {})
    write_entry(ONE.record, entry | {"figures": figures(ONE, ALL_PASSED, SAME_BITS)})
    assert (
        recorded(ONE, entry)
        == recorded(ONE, entry | {"machine": "1 x NVIDIA H200; 32 cores of a host"})
        == (ALL_PASSED, SAME_BITS)
    )
    for change in (
        {"commit": "def5678"},
        {"machine": "1 x NVIDIA H100; 16 cores of a host"},
        {"versions": {}},
    ):
        assert recorded(ONE, entry | change) == ({}, {})
    for commit in ("unknown", "abc1234+"):
        write_entry(
            ONE.record, entry | {"commit": commit, "figures": figures(ONE, ALL_PASSED, SAME_BITS)}
        )
        assert recorded(ONE, entry | {"commit": commit}) == ({}, {}), (
            "whether that is the same code is not known"
        )


def test_changed_bits_under_an_equal_fingerprint_are_red() -> None:
    golden = GOLDEN[0]
    same = {"fingerprint": asdict(golden.fingerprint), "bits": golden.bits}
    other = same | {"bits": "0123456789abcdef"}
    on = {**golden.versions, "driver": "580.159.04"}
    assert moved(golden.gpus, same, on) == moved(golden.gpus, {}, on) == []
    [why] = moved(golden.gpus, other, on)
    assert f"moved from {golden.bits} to 0123456789abcdef: raise the version in kernels/" in why
    raised = replace(golden.fingerprint, numerics=f"strict {versions.GPU + 1}")
    assert moved(golden.gpus, other | {"fingerprint": asdict(raised)}, on) == []
    assert moved(golden.gpus, other, on | {"torch": "9"}) == [], "another library adds otherwise"


def test_golden_bits_match_current_and_recorded_numerics() -> None:
    for golden in GOLDEN:
        assert golden.fingerprint.numerics == f"strict {versions.GPU}"
        exact = json.loads(PLANS[golden.gpus].record.read_text())["figures"]["exact"]
        fingerprint = convert(exact["fingerprint"], Fingerprint)
        assert (golden.bits, golden.fingerprint) == (exact["bits"], fingerprint)


def test_parts_run_separately_make_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record_tests, "RESULTS", tmp_path)
    monkeypatch.setattr(record_tests, "require_gpu", lambda count: None)
    monkeypatch.setattr(
        record_tests,
        "entry_of",
        lambda found, command, on_gpu, commit: {"commit": commit, "machine": "x", "versions": {}},
    )
    statuses = {"exact": 0}

    ran_last: list[str] = []

    def ran(*command: str) -> int:
        ran_last[:] = command
        Path(command[-1]).write_text(json.dumps({"figures": SAME_BITS}))
        return statuses["exact"]

    def ran_tests(*arguments: str, timeout_s: float) -> tuple[int, list[Element]]:
        return 0, [*fromstring(ONE_PASSED).iter("testsuite")]

    monkeypatch.setattr(record_tests, "run", ran)
    monkeypatch.setattr(record_tests, "tested", ran_tests)
    for part in ONE.runs:
        assert record_tests.main(["--commit", "abc", "--part", part, "-n", "4"]) == 0
        assert "red" in capsys.readouterr().out
    statuses["exact"] = 1
    assert record_tests.main(["--commit", "abc", "--part", EXACT]) == 1
    assert "red" in capsys.readouterr().out
    [said] = json.loads(ONE.record.read_text())["figures"]["parts"][EXACT]["red"]
    assert said == "tlt bench exact"
    statuses["exact"] = 0
    assert record_tests.main(["--commit", "abc", "--part", EXACT]) == 0
    assert "green" in capsys.readouterr().out
    assert list(json.loads(ONE.record.read_text())["figures"]["parts"]) == [*ONE.parts]
    statuses["exact"] = 1
    assert record_tests.main(["--commit", "abc+", "--part", EXACT, "--part", "engine"]) == 1, (
        "none of a run's own is lost"
    )
    assert list(json.loads(ONE.record.read_text())["figures"]["parts"]) == ["engine", EXACT]
    for part in TWO.runs:
        assert record_tests.main(["--gpus", "2", "--commit", "abc", "--part", part]) == 0
    statuses["exact"] = 0
    assert record_tests.main(["--gpus", "2", "--commit", "abc", "--part", EXACT]) == 0
    assert "test-tp2-gpu.json: green" in capsys.readouterr().out
    assert ran_last[-4:-2] == ["--tensor-parallel", "2"]
    with pytest.raises(SystemExit):
        record_tests.main(["--gpus", "2", "--part", "trainer"])
    assert "name one of exchange, engine, weight channels, exactness" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "needs"),
    [(1, r"^@gpu|mark\.gpu(?!\")|^pytestmark = gpu"), (2, r"device_count\(\) (< 2|> 1)")],
)
def test_record_has_every_test_that_needs_its_number_of_gpus(gpus: int, needs: str) -> None:
    root = Path(__file__).parents[2]
    needing = {
        str(file.relative_to(root))
        for file in (root / "tests").rglob("test_*.py")
        if re.search(needs, file.read_text(), re.MULTILINE)
    }
    selected = [word for of in PLANS[gpus].runs.values() for word in of if word.startswith("tests")]
    missing = [file for file in sorted(needing) if not file.startswith(tuple(selected))]
    assert len(needing) > 2 and missing == []
