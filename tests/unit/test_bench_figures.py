"""Figures that benches compute from timings, profiles and replayed cycles."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.unit.sampled import samples
from tlt_server.bench.arguments import BENCHES
from tlt_server.bench.cycle import cases_of
from tlt_server.bench.decode import parts, prices
from tlt_server.bench.device_time import device_time
from tlt_server.bench.interrupt import Felt
from tlt_server.bench.record import entry_of, finish
from tlt_server.bench.settings import own
from tlt_server.bench.tables import cells, show
from tlt_server.engine.settings import EngineSettings
from tlt_server.speculation.cost import KNOTS, CostModel, CostRecord
from tlt_server.speculation.drafters import DRAFTERS
from tlt_server.trainer.judging import figures
from tlt_server.trainer.judging.figures import ByResponse
from tlt_server.trainer.replaying.evaluate import Walked
from tlt_server.trainer.replaying.plans import RecordedPlan
from tlt_server.wire.records import OFF, Strategy


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 60), st.integers(0, 12)), min_size=1)
)
def test_overlapped_time_counts_once_for_the_earliest_kernel(
    pieces: list[tuple[str, int, int]],
) -> None:
    found = device_time(
        [(name, float(start), float(start + length)) for name, start, length in pieces], steps=1
    )
    order = sorted(pieces, key=lambda piece: (piece[1], piece[1] + piece[2]))
    owner: dict[int, str] = {}
    for name, start, length in order:
        for moment in range(start, start + length):
            owner.setdefault(moment, name)
    assert found.busy_ms == pytest.approx(len(owner) / 1e3)
    for name, ms in found.longest:
        assert ms == pytest.approx(sum(of == name for of in owner.values()) / 1e3)


def test_gpu_idle_time_is_the_span_no_kernel_covers() -> None:
    events = [
        ("a", 0.0, 400.0),
        ("b", 300.0, 500.0),
        ("a", 1000.0, 1500.0),
        ("c", 1900.0, 2000.0),
    ]  # microseconds
    found = device_time(events, steps=2)
    assert (found.span_ms, found.busy_ms, found.kernels) == (1.0, 0.55, 2)
    assert found.idle_percent == pytest.approx(45.0)
    assert found.longest == [("a", 0.45), ("b", 0.05), ("c", 0.05)], (
        "b waits for a as long as both are there"
    )


def test_price_of_strict_numerics_is_the_time_ratio_minus_one() -> None:
    rows = [
        {"numerics": kind, "batch": batch, "prompt": 128, "step_ms": ms}
        for kind, batch, ms in (
            ("strict", 1, 4.2),
            ("strict", 8, 4.0),
            ("fast", 1, 4.0),
            ("fast", 8, 5.0),
        )
    ]
    prefill = [
        {"numerics": kind, "prompts": 1, "length": 4096, "tokens_per_s": rate}
        for kind, rate in (("strict", 40.0), ("fast", 50.0))
    ]
    found = prices(parts(rows, 2, 1), parts(prefill, 2, 1))
    assert [row["percent"] for row in found] == [5.0, -20.0, 25.0] and found[-1]["ratio"] == 0.8


def test_trees_are_timed_where_their_rows_are_affordable() -> None:
    assert [case.name for case in cases_of((1, 8), 16000)] == [
        "batch 1, eagle:7x4x32, prompt 128",
        "batch 1, eagle:7x1x8, prompt 128",
        "batch 8, eagle:7x1x8, prompt 128",
        "batch 1, eagle:7x4x32, prompt problem",
        "batch 1, eagle:7x1x8, prompt problem",
        "batch 1, eagle:7x4x32, prompt 16000",
        "batch 1, eagle:7x1x8, prompt 16000",
    ]


def test_strategies_draft_with_the_loaded_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DRAFTERS, "other", DRAFTERS["eagle"]._replace(architectures=("Other",)))
    (tmp_path / "config.json").write_text('{"architectures": ["Other"]}')
    written = OFF, Strategy("eagle", 7, 1, 8), Strategy("history", 7, 1, 8)
    loaded = EngineSettings(model="", drafter=str(tmp_path))
    drafters = [own(each, loaded).drafter for each in written]
    assert drafters == ["", "other", "history"]
    assert all(own(each, EngineSettings(model="", drafter="none")) == each for each in written)


def arguments(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    BENCHES["decode"].add("decode", parser)
    return parser.parse_args(flags)


def test_batches_flag_is_a_list_of_numbers() -> None:
    assert arguments("--batch", "1,64").batch == (1, 64)
    for wrong in ("0", "1,,2", "a", "-1", "5000000"):
        with pytest.raises(SystemExit):
            arguments("--batch", wrong)


@pytest.mark.parametrize("flag", ["--context", "--max-rows", "--threads"])
@pytest.mark.parametrize("wrong", ["-5", "0", "1e9", "99999999999"])
def test_numeric_bench_flags_are_bounded(
    flag: str, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments(flag, wrong)
    assert f"'{wrong}' is not a whole number from 1 to 1048576" in capsys.readouterr().err


def test_unwritable_file_is_refused_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong in (tmp_path, tmp_path / "none" / "decode.json"):
        with pytest.raises(SystemExit):
            arguments("--json", str(wrong))
        assert "name a file in a directory that exists" in capsys.readouterr().err


def test_result_file_records_machine_and_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["/usr/bin/tlt", "bench", "decode", "--model", "/disks/1/my model"]
    )
    file = tmp_path / "decode.json"
    finish(arguments("--json", str(file), "--commit", "abc1234"), {"bench": "decode"}, on_gpu=False)
    entry = json.loads(file.read_text())
    assert (
        json.loads(capsys.readouterr().out.splitlines()[-1])
        == entry["figures"]
        == {"bench": "decode"}
    )
    assert entry["command"] == "tlt bench decode --model '.../my model'"
    assert entry["commit"] == "abc1234"


def test_result_commit_comes_from_git_unless_named() -> None:
    assert entry_of({}, "x", on_gpu=False)["commit"]
    assert entry_of({}, "x", on_gpu=False, commit="named")["commit"] == "named"


def test_table_cells_are_empty_for_missing_figures() -> None:
    columns = {"a": "{a!n}", "b": "{b[1]:.1f} ms", "c": "{c:.0%}", "d": "{d}"}
    rows = ({"a": 812.0, "b": [1, 2.25], "c": 0.5, "d": "off"}, {"a": 1.25, "c": None, "d": 3})
    assert [cells(columns, row) for row in rows] == [
        ["812", "2.2 ms", "50%", "off"],
        ["1.25", "", "", "3"],
    ]


def test_delays_exclude_those_of_an_idle_trainer() -> None:
    interrupting = [("training", 0.017), ("evaluating", 0.007), ("training", 0.012)]
    found = Felt([1.0, 1.0], [0.005, 0.007, 0.007], [1.02, 1.0], interrupting).figures()
    assert found["states"] == {"training": 2, "evaluating": 1} and found["requests"] == 3
    assert found["delay_ms"] == {"p50": 5.0, "p90": 10.0, "p99": 10.0, "p100": 10.0}
    assert (found["training_delay_p99_ms"], found["parked_slowdown_percent"]) == (10.0, 1.0)


def test_tables_without_rows_show_only_headings(capsys: pytest.CaptureFixture[str]) -> None:
    show(Console(width=80), "graphs", {"key": "{key}", "bytes": "{bytes}"}, [])
    show(Console(width=80), "graphs", {"key": "{key}"}, [{"key": "extend 8"}])
    said = capsys.readouterr().out
    assert "bytes" in said and "extend 8" in said


def walked(*cycles: tuple[int, int, int, int]) -> Walked:
    """Cycles of (response, root, accepted, emitted)."""
    response_C, root_C, accepted_C, emitted_C = np.array(cycles, np.int32).T
    zeros_C = np.zeros(len(cycles), np.int32)
    return Walked(response_C, root_C, zeros_C, zeros_C + 4, accepted_C, emitted_C)


def test_last_cycle_counts_only_the_remaining_tokens() -> None:
    found = walked((0, 3, 2, 3), (1, 2, 2, 2))
    assert figures.accept_length(found) == 2.5
    assert figures.by_depth(found, 3) == [1, 1, 0]
    assert figures.by_length(found, samples().responses) == [(3, 2.0), (4, 3.0)]
    assert figures.by_kind(found, ["a", "b"]) == {"a": 3.0, "b": 2.0}


def test_vocabulary_coverage_counts_only_output_tokens() -> None:
    assert figures.coverage(samples().responses, [0], np.array([1, 2, 10, 12])) == 0.5


def test_cycle_takes_the_measured_time_of_its_batch() -> None:
    cost = CostModel()
    cost.restore(
        CostRecord(
            extend=[1e-3 * k for k in KNOTS],
            start={"eagle": [2e-4] * len(KNOTS)},
            draft={"eagle": [1e-4] * len(KNOTS)},
            linear=[0, 0, 0],
        )
    )
    found = figures.cycle_ms(walked((0, 3, 2, 3)), [Strategy("eagle", 3, 1, 4)], cost, 2)
    assert found == pytest.approx([8 + 0.2 + 0.3], rel=1e-2)  # a request's own time is above 0


def test_mean_times_need_the_times_of_all_cycles() -> None:
    found = walked((0, 3, 2, 3), (0, 6, 3, 4))
    assert figures.mean_ms(found, np.array([6.0, 8.0])) == (7.0, 2.0)
    assert figures.mean_ms(found, None) == (None, None)
    assert figures.mean_ms(Walked.joined([]), np.zeros(0)) == (None, None)


def sums(cycles: list[int], tokens: list[int]) -> ByResponse:
    counts = np.array(cycles)
    return ByResponse(np.arange(len(cycles)), counts, np.array(tokens), 2.0 * counts)


def test_drafters_are_compared_response_by_response() -> None:
    base = sums([10, 20, 30, 40], [40, 80, 90, 160])
    other = sums([8, 16, 24, 32], [40, 80, 90, 160])
    found = figures.paired(base, other, np.arange(4, dtype=np.int32))
    assert found.cycles_saved == pytest.approx((0.2, 0.2, 0.2))
    assert found.time_saved == pytest.approx((0.2, 0.2, 0.2))
    assert found.accept_length.value == pytest.approx(370 / 80 - 3.7)
    assert found.per_response.low <= found.per_response.value <= found.per_response.high
    unknown = base._replace(ms_N=np.full(4, np.nan))
    assert figures.paired(unknown, other, np.arange(4, dtype=np.int32)).time_saved is None


def test_responses_of_one_prompt_widen_the_interval() -> None:
    random = np.random.default_rng(0)
    base = sums([20] * 64, [80] * 64)
    other = sums((18 + random.integers(-4, 5, 8).repeat(8)).tolist(), [80] * 64)
    apart = figures.paired(base, other, np.arange(64, dtype=np.int32)).cycles_saved
    together = figures.paired(base, other, np.arange(8, dtype=np.int32).repeat(8)).cycles_saved
    assert together.high - together.low > 1.5 * (apart.high - apart.low)


def test_recorded_plan_uses_the_last_root_before_a_position() -> None:
    """Response 0 has the roots 3 (nothing drafted) and 4 (5 own rows), response 1 the root 2."""
    given = samples()
    assert given.legend.strategies[0] == OFF
    plan = RecordedPlan(given.legend.strategies, given.verified, "eagle")
    found = plan.at(np.array([0, 0, 0, 1, 1]), np.array([3, 4, 5, 2, 1]))
    assert found.rows_B.tolist() == [0, 5, 5, 6, 0]
    assert found.strategy_B.tolist()[1:4] == [1, 1, 1]
    assert found.next_B.tolist()[0] == 4 and found.next_B.tolist()[4] == 2
