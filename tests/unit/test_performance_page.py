"""docs/performance.md is what its generator makes of the committed results; every kind of result
finds its place in it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record_tests
from benchmarks.first_screen import BULLETS, with_figures
from benchmarks.goals import Result, answer, comparable, goals, results, verdict
from benchmarks.plot import PICTURE, drawn
from benchmarks.plot import figures as plotted
from benchmarks.record_tests import RUNS, counts, figures, recorded
from benchmarks.report import PAGE, README, RESULTS, page
from tlt_server.bench.record import write_entry
from tlt_server.bench.weights import Push, row

SHAPE = {
    "layers": 28,
    "hidden": 3584,
    "intermediate": 18944,
    "heads": 28,
    "kv_heads": 4,
    "vocab": 152064,
}
COMMON = {
    "quick": False,
    "shape": SHAPE,
    "drafter": "eagle",
    "device": "cuda",
    "dtype": "bfloat16",
    "attention": "triton",
    "numerics": "strict",
    "max_running": 256,
}
STEP = {
    "context": 137,
    "steps": 400,
    "quartiles_ms": [3.9, 4.1],
    "tokens_per_s": 250.4,
    "accept_length": 1.0,
}
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
ALL_PASSED = dict.fromkeys([*RUNS, record_tests.EXACT], PASSED)
SAME_BITS = {"requests": 612, "differing_tokens": 0, "differing_logprob_bits": 0}


def result(
    name: str,
    date: str = "2026-11-22",
    machine: str = "1 x NVIDIA H200 (140 GiB); 16 cores of a host",
    **said: Any,
) -> Result:
    return Result(
        name,
        {
            "command": "tlt bench x",
            "commit": "abc1234",
            "date": date,
            "machine": machine,
            "versions": {"torch": "2.11.0"},
            "figures": {**COMMON, **said},
        },
    )


def decode(name: str, step_ms: float, **how: Any) -> Result:
    rows = [
        {
            "numerics": kind,
            "prompt": 128,
            "batch": batch,
            "strategy": "off",
            "step_ms": step_ms,
            **STEP,
        }
        for kind in ("strict", "fast")
        for batch in (1, 8, 32, 64, 256)
    ]
    price = [
        {"what": "decode", "batch": batch, "prompt": 128, "percent": batch / 10}
        for batch in (1, 8, 32, 64, 256)
    ]
    price += [{"what": "prefill", "prompts": 8, "length": 2048, "percent": 11.1, "ratio": 0.9}]
    prefill = [{"numerics": "strict", "prompts": 8, "length": 2048, "tokens_per_s": 45000.0}]
    return result(name, bench="decode", prompt=128, rows=rows, price=price, prefill=prefill, **how)


PUSHES = [
    Push(
        seconds, {"pause_ms": pause_ms, "phases_s": {"read": seconds / 2, "commit": pause_ms / 1e3}}
    )
    for seconds, pause_ms in ((3.0, 0.5), (5.0, 97.0), (4.0, 0.4))
]
EXAMPLES = [
    decode("decode-h200.json", 3.8),
    result(
        "prefill-h200.json",
        bench="prefill",
        rows=[
            {
                "with": "strict",
                "prompts": 8,
                "length": 2048,
                "ms": 380.0,
                "tokens_per_s": 43000,
                "ratio": 0.93,
            }
        ],
    ),
    result(
        "cycle-h200.json",
        bench="cycle",
        rows=[
            {
                **STEP,
                "prompt": 128,
                "batch": 1,
                "strategy": "eagle:7x4x32",
                "step_ms": 5.5,
                "gpu_idle_percent": 0.4,
                "profiled_steps": 20,
                "profiled_step_ms": 5.4,
                "kernels_per_step": 300,
                "longest_kernels_ms": [["gemm", 3.0]],
            }
        ],
    ),
    result(
        "graphs-h200.json",
        bench="graphs",
        default=True,
        graphs=40,
        graph_bytes=1_500_000_000,
        capture_s=12.0,
        phases_s={"load model": 9.0},
        ready_s=40.0,
        triton_cache="warm",
        pages=100,
        policy="beg",
    ),
    result(
        "exact-h200.json",
        bench="exact",
        configurations=18,
        requests=2304,
        tokens=200_000,
        preemptions=50,
        differing_tokens=0,
        differing_logprob_bits=0,
        differing_responses=0,
        differing_token_rate=0.0,
    ),
    result(
        "weights-h200.json",
        bench="weights-gpu",
        rounds=3,
        rows=[
            {
                "channel": "ipc",
                "bytes": 15_200_000_000,
                "staged_s": 2.0,
                "gb_per_s": 7.6,
                "push_s": 2.1,
                "pause_ms": 17.0,
                "requests": 8,
                "longest_gap_ms": 21.5,
                "step_ms": 4.0,
                "step_while_staging_ms": 4.5,
            }
        ],
    ),
    result(
        "weights-spooled.json",
        bench="weights-gpu",
        rounds=3,
        spooled=True,
        rows=[
            {
                "channel": "nccl",
                "bytes": 15_200_000_000,
                "staged_s": 1.0,
                "gb_per_s": 15.2,
                "push_s": 9.1,
                "pause_ms": 17.0,
                "requests": 8,
                "longest_gap_ms": 26.5,
                "step_ms": 4.0,
                "step_while_staging_ms": 4.5,
            }
        ],
    ),
    result(
        "weights.json",
        bench="weights",
        rounds=3,
        requests=4,
        rows=[{"checkpoint": "random", **row("disk", 10**9, [1.0, 2.0, 3.0], PUSHES, PUSHES)}],
    ),
    result(
        "products.json",
        bench="products",
        rows=[
            {
                "rows": 256,
                "step_ms": 6.3,
                "products_ms": 6.1,
                "floor_ms": 3.3,
                "cublas_ms": 5.9,
                "of_floor": 1.85,
                "of_cublas": 1.034,
            }
        ],
    ),
    result("trees.json", bench="trees", rows=[{"requests": 1, "walk_us": 3.5}]),
    result("test-gpu.json", **figures(ALL_PASSED, SAME_BITS)),
]


def goal(what: str) -> dict[str, Any]:
    return next(goal for goal in goals()["goals"] if goal["what"] == what)


def test_the_committed_page_is_what_the_generator_makes() -> None:
    assert PAGE.read_text() == page(results(RESULTS)), "run: python -m benchmarks.report"


def test_the_first_screen_has_five_figures_of_the_committed_results() -> None:
    readme = README.read_text()
    assert readme == with_figures(readme, results(RESULTS)), "run: python -m benchmarks.report"
    assert len(BULLETS.findall(readme)) == 1 and readme.count("\n- **") == 5


def test_the_plot_was_drawn_from_the_committed_figures() -> None:
    assert drawn(PICTURE) == plotted(), "run: python -m benchmarks.plot"


def test_every_file_of_results_is_on_the_page() -> None:
    for file in RESULTS.glob("*.json"):
        assert f"](../benchmarks/results/{file.name}): `" in PAGE.read_text(), (
            f"{file.name} is of a bench that the page has no section for"
        )


def test_each_kind_of_result_has_its_section_goals_and_source() -> None:
    text = page(EXAMPLES)
    for line in (
        "| plain decode, batch 1, ms per step | 4.1 / 3.7 | [3.80](",
        "/results/decode-h200.json) | reached |",
        "| SD cycle of depth 7, batch 1, 32 rows, ms per cycle | 6.0 / 5.2 | [5.50](",
        "| price of strict, decode, batch 1-64, % more time | 3 / 0 | [6.40](",
        "| all graphs of the default configuration, memory, GB | 2 / 1 | [1.50](",
        "over all configurations, runs | 2000 / 2000 | [2304](",
        "results/decode-h200.json) | 3.80 | 3.80 | 3.80 | 3.80 | 3.80 |",
        "| `gemm` | 3.000 |",
        "at the commit of pushed weights, ipc, ms | 25 / 20 | [21.50](",
        "| 25 / 20 | [26.50](../benchmarks/results/weights-spooled.json) | short |",
        "| random | 1000 | disk | 4.00 | 2.00x | 4.00 | 97.00 |",
        "| ipc | 15.2 | 2.00 | 7.6 |",
        "by rows: 1.034 (256).",
        "1 rows of figures, in the file only.",
        "server 5 / 0 / 0",
    ):
        assert line in text, line
    assert all(
        f"](../benchmarks/results/{example.name}): `tlt bench x` at abc1234" in text
        for example in EXAMPLES
    )
    assert "](performance_notes.md)" in text and text.count("\n# ") == 0


def test_the_newest_full_run_on_the_goals_machine_counts() -> None:
    found = [
        decode("old.json", 4.5, date="2026-11-21"),
        decode("new.json", 4.0),
        decode("quick.json", 1.0, quick=True),
        decode("other.json", 2.0, machine="1 x NVIDIA A100"),
        decode("small.json", 0.5, shape={**SHAPE, "layers": 8}),
    ]
    answered = answer(goal("plain decode, batch 1"), comparable(found, goals()))
    assert answered is not None and (answered.value, answered.name) == (4.0, "new.json")


def test_of_pushes_the_median_counts_and_of_pauses_the_longest() -> None:
    idle = [push._replace(reply={**push.reply, "pause_ms": 500.0}) for push in PUSHES]
    found = row(
        "disk",
        10**9,
        [1.0, 2.0, 3.0],
        idle,
        [push._replace(seconds=2 * push.seconds) for push in PUSHES],
    )
    assert (found["push_s"], found["phases_s"], found["ratio"]) == (
        4.0,
        {"read": 2.0, "commit": 0.0005},
        2.0,
    )
    assert (found["push_while_decoding_s"], found["longest_pause_ms"]) == (8.0, 97.0), (
        "of those into a server that decodes"
    )


def test_the_page_says_whether_pushes_were_spooled() -> None:
    _, *parts = re.split(r"\n\[(\S+)\]\(\.\./benchmarks/results/\S+\): `", page(EXAMPLES))
    said = dict(zip(parts[::2], parts[1::2], strict=True))
    assert "Without `--state-dir`, so nothing is spooled." in said["weights-h200.json"]
    assert "With `--state-dir`, so every push is also spooled" in said["weights-spooled.json"]


@pytest.mark.parametrize(
    ("what", "value", "expected"),
    [
        ("plain decode, batch 1", 3.7, "stretch reached"),
        ("plain decode, batch 1", 4.1, "reached"),
        ("plain decode, batch 1", 4.11, "short"),
        ("batch 1, padded demo pair, with SD", 799.0, "short"),
        ("batch 1, padded demo pair, with SD", 1300.0, "stretch reached"),
        ("exactness: differing tokens", 1, "short"),
    ],
)
def test_verdicts(what: str, value: float, expected: str) -> None:
    assert verdict(goal(what), value) == expected


def test_goals_ask_for_fields_that_benches_write() -> None:
    asked = {(g["bench"], g["field"]) for g in goals()["goals"]}
    written = {
        (r.bench, field)
        for r in EXAMPLES
        for part in (r.figures, *r.figures.get("rows", ()), *r.figures.get("price", ()))
        for field in part
    }
    assert asked <= written


def test_counts_of_a_test_run(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    assert counts(report, -9)["red"] == ["the run, which ended with status -9"]
    report.write_text(TEST_REPORT[:100])
    assert counts(report, 3)["failed"] == 1, "a run that never finished is red"
    report.write_text(TEST_REPORT)
    assert counts(report, 1) == {
        "passed": 1,
        "failed": 2,
        "skipped": 1,
        "seconds": 3.2,
        "red": ["t::b", "t::c"],
    }
    report.write_text(ONE_PASSED)
    assert counts(report, 0)["failed"] == 0 and counts(report, 2)["failed"] == 1, (
        "interrupted before a test failed"
    )


def test_a_record_is_green_once_every_part_has_passed() -> None:
    first = next(iter(RUNS))
    assert figures(ALL_PASSED, SAME_BITS)["green"]
    for part in ALL_PASSED:
        assert not figures(
            {name: came for name, came in ALL_PASSED.items() if name != part}, SAME_BITS
        )["green"]
    for came in (PASSED | {"failed": 1}, PASSED | {"passed": 0}):
        assert not figures(ALL_PASSED | {first: came}, SAME_BITS)["green"]


def test_parts_add_to_the_record_of_the_same_code_and_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_tests, "RECORD", tmp_path / "test-gpu.json")
    entry = {
        "commit": "abc1234",
        "machine": "1 x NVIDIA H200; 16 cores of a host",
        "versions": {"torch": "2.11.0"},
    }
    assert recorded(entry) == ({}, {})
    write_entry(record_tests.RECORD, entry | {"figures": figures(ALL_PASSED, SAME_BITS)})
    assert (
        recorded(entry)
        == recorded(entry | {"machine": "1 x NVIDIA H200; 32 cores of a host"})
        == (ALL_PASSED, SAME_BITS)
    )
    for change in (
        {"commit": "def5678"},
        {"machine": "1 x NVIDIA H100; 16 cores of a host"},
        {"versions": {}},
    ):
        assert recorded(entry | change) == ({}, {})
    for commit in ("unknown", "abc1234+"):
        write_entry(
            record_tests.RECORD,
            entry | {"commit": commit, "figures": figures(ALL_PASSED, SAME_BITS)},
        )
        assert recorded(entry | {"commit": commit}) == ({}, {}), (
            "whether that is the same code is not known"
        )


def test_parts_run_one_by_one_into_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record_tests, "RECORD", tmp_path / "test-gpu.json")
    monkeypatch.setattr(record_tests, "require_gpu", lambda: None)
    monkeypatch.setattr(
        record_tests,
        "entry_of",
        lambda found, command, on_gpu, commit: {"commit": commit, "machine": "x", "versions": {}},
    )
    statuses = {"exact": 0}

    def ran(*command: str) -> int:
        file = Path(
            next(word for word in command if word.endswith("report")).removeprefix("--junitxml=")
        )
        file.write_text(json.dumps({"figures": SAME_BITS}) if "exact" in command else ONE_PASSED)
        return statuses["exact"] if "exact" in command else 0

    monkeypatch.setattr(record_tests, "run", ran)
    for part in RUNS:
        assert (
            record_tests.main(["--commit", "abc", "--part", part, "-n", "4"]) == 0
            and "red" in capsys.readouterr().out
        )
    statuses["exact"] = 1
    assert (
        record_tests.main(["--commit", "abc", "--part", record_tests.EXACT]) == 1
        and "red" in capsys.readouterr().out
    )
    statuses["exact"] = 0
    assert (
        record_tests.main(["--commit", "abc", "--part", record_tests.EXACT]) == 0
        and "green" in capsys.readouterr().out
    )
    assert list(json.loads(record_tests.RECORD.read_text())["figures"]["parts"]) == [
        *RUNS,
        record_tests.EXACT,
    ]
    statuses["exact"] = 1
    assert (
        record_tests.main(["--commit", "abc+", "--part", record_tests.EXACT, "--part", "engine"])
        == 1
    ), "none of a run's own is lost"
    assert list(json.loads(record_tests.RECORD.read_text())["figures"]["parts"]) == [
        "engine",
        record_tests.EXACT,
    ]


def test_results_are_of_one_form() -> None:
    for file in RESULTS.glob("*.json"):
        entry = json.loads(file.read_text())
        assert {"command", "commit", "date", "machine", "versions", "figures"} <= set(entry), (
            file.name
        )
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", entry["date"])


def test_the_record_holds_every_test_that_needs_a_gpu():
    root = Path(__file__).parents[2]
    marked = {
        str(file.relative_to(root))
        for file in (root / "tests").rglob("test_*.py")
        if re.search(r"^@gpu|mark\.gpu|^pytestmark = gpu", file.read_text(), re.MULTILINE)
    }
    selected = [
        word for selection in RUNS.values() for word in selection if word.startswith("tests")
    ]
    assert (
        marked
        and [file for file in sorted(marked) if not any(file.startswith(path) for path in selected)]
        == []
    )
