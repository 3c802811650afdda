"""docs/performance.md is what its generator makes of the committed results; every kind of result
finds its place in it.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from benchmarks.comparison import suited
from benchmarks.goals import Result, answer, comparable, goals, results, rows_of, verdict
from benchmarks.plot import PICTURE, drawn
from benchmarks.plot import figures as plotted
from benchmarks.record_tests import PLANS, figures
from benchmarks.report import (
    BULLETS,
    FP8_PAGE,
    PAGE,
    README,
    RESULTS,
    page,
    with_figures,
    with_table,
)
from tlt_server.bench.clients import LoadRow, Sent
from tlt_server.bench.clients import figures as load_figures
from tlt_server.bench.rollout import RolloutRun
from tlt_server.bench.rollout import figures as rollout_figures
from tlt_server.bench.weights import MeasuredPush, row

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
PASSED = {"passed": 5, "failed": 0, "skipped": 0, "seconds": 2.0}
ALL_PASSED = dict.fromkeys(PLANS[1].parts, PASSED)
SAME_BITS = {"requests": 612, "differing_tokens": 0, "differing_logprob_bits": 0}


def result(
    name: str,
    date: str = "2026-11-22",
    machine: str = "1 x NVIDIA H200 (140 GiB); 16 cores of a host",
    command: str = "tlt bench x",
    **said: Any,
) -> Result:
    return Result(
        name,
        {
            "command": command,
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
    MeasuredPush(
        seconds, {"pause_ms": pause_ms, "phases_s": {"read": seconds / 2, "commit": pause_ms / 1e3}}
    )
    for seconds, pause_ms in ((3.0, 0.5), (5.0, 97.0), (4.0, 0.4))
]


def rollout_run(seconds: float) -> RolloutRun:
    counted = {"step_s": {"eagle chain": seconds}}
    return RolloutRun(seconds, 60_000, 9_000.0, b"same", 900, 700, counted)


def sent(seconds: float) -> Sent:
    return Sent(seconds, 60_000, 0.6, ["a text"] * 256)


FLEET = [
    result(
        "fleet-rollout-h200.json",
        bench="fleet-rollout",
        replicas=2,
        added_p50_ms=1.5,
        added_p99_ms=4.0,
        streams_lost=32,
        resumed_s=0.5,
        read_again_s=0.25,
        beyond_reading_s=0.25,
        others_longest_gap_ms=21.0,
        routed_again_s=30.0,
        noticed_s=3.4,
        gateway_again_s=1.5,
        tokens_differing=0,
        logprobs_differing=0,
        rows=[
            {
                "workload": workload,
                "policy": "off",
                "one_tokens_per_s": 28_000,
                "fleet_tokens_per_s": 55_000,
                "over_one": 1.96,
                "gateway_percent": 20.0,
                "fleet_s": 8.0,
                "simulated_s": 7.8,
                "over_simulated": 1.02,
            }
            for workload in ("full 256", "1024")
        ],
    ),
    result(
        "fleet-frontend-h200.json",
        bench="fleet-frontend",
        replicas=8,
        tokens_per_s=220_000,
        gateway_percent=36.0,
        tokens_per_cpu_s=611_000,
        full_rate=224_000,
        full_rate_percent=36.7,
    ),
    result(
        "fleet-exact-h200.json",
        bench="fleet-exact",
        replicas=3,
        requests=2100,
        tokens=168_000,
        strategies=7,
        kills=21,
        drains=63,
        moves=3000,
        never_moved_at_most=4,
        pushes={"disk": 14, "http": 7},
        tokens_differing=0,
        logprobs_differing=0,
    ),
    result(
        "fleet-weights-h200.json",
        bench="fleet-weights",
        replicas=2,
        bytes=15_200_000_000,
        one=[{"push_s": 6.0}],
        fleet=[{"push_s": 6.6, "first_to_last_commit_ms": 30.0, "longest_gap_ms": 22.0}],
        over_one=1.1,
        catch_up_gb_per_s=2.0,
    ),
]
EXAMPLES = [
    *FLEET,
    decode("decode-h200.json", 3.8),
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
        "load-h200.json",
        bench="load",
        clients=256,
        max_tokens=256,
        rounds=2,
        **load_figures(
            {
                LoadRow("off", "batch", None): [sent(2.0), sent(4.0)],
                LoadRow("off", "whole", None): [sent(2.5), sent(4.0)],
                LoadRow("off", "streamed", None): [sent(4.0), sent(8.0)],
            }
        ),
        **COMMON,
    ),
    result(
        "rollout-http-h200.json",
        bench="rollout-http",
        seeds=[1, 2],
        penalties=False,
        first_s=2.1,
        later_s=2.0,
        first_over_later=1.05,
        **rollout_figures(
            {
                ("512", "goodput"): [rollout_run(2.0), rollout_run(3.0)],
                ("512", "off"): [rollout_run(8.0), rollout_run(6.0)],
                ("512", "fixed:eagle:7x1x8"): [rollout_run(3.0), rollout_run(3.0)],
            },
            "demo",
        ),
        **COMMON,
    ),
    result(
        "interrupt-h200.json",
        bench="interrupt",
        requests=500,
        states={"training": 480, "evaluating": 20},
        idle_ms={"p50": 7.0, "p99": 9.0},
        delay_ms={"p50": 4.0, "p99": 18.5},
        training_delay_p99_ms=18.5,
        parkings=501,
        parked_slowdown_percent=0.04,
        **COMMON,
    ),
    result("test-gpu.json", **figures(PLANS[1], ALL_PASSED, SAME_BITS)),
]


def goal(what: str) -> dict[str, Any]:
    return next(goal for goal in goals()["goals"] if goal["what"] == what)


def test_committed_performance_page_equals_the_generated_one() -> None:
    assert PAGE.read_text() == page(results(RESULTS)), "run: python -m benchmarks.report"
    fp8 = FP8_PAGE.read_text()
    assert fp8 == with_table(fp8, results(RESULTS)), "run: python -m benchmarks.report"


def test_first_screen_has_the_committed_figures() -> None:
    readme = README.read_text()
    assert readme == with_figures(readme, results(RESULTS)), "run: python -m benchmarks.report"
    assert len(BULLETS.findall(readme)) == 1 and readme.count("\n- **") in (5, 6)


def test_fp8_runs_answer_goals_of_fp8_alone() -> None:
    found = [
        decode("decode.json", 3.8),
        decode("decode-fp8.json", 2.5, quantization="fp8", command="tlt bench x"),
        decode("decode-kv.json", 1.5, quantization="fp8", kv_cache_dtype="fp8_e4m3"),
    ]
    for each in found[1].figures["rows"]:
        each["quantization"] = "fp8"
    text = with_table("<!--figures-->\n<!--/figures-->", found)
    assert (
        "|plain decode, batch 1, ms per step|[3.8](../benchmarks/results/decode.json)|[2.5]("
        in text
    )
    assert "/decode-fp8.json)|\n" in text and "kv" not in text
    assert "Not measured" in with_table(text, found[:1]) and "1.5" not in text


def test_the_plot_was_drawn_from_the_committed_figures() -> None:
    assert drawn(PICTURE) == plotted(), "run: python -m benchmarks.plot"


def test_every_result_file_is_on_the_page() -> None:
    for file in RESULTS.glob("*.json"):
        assert f"](../benchmarks/results/{file.name}): `" in PAGE.read_text(), (
            f"{file.name} is of a bench that the page has no section for"
        )


def test_figures_are_in_their_section_and_answer_goals() -> None:
    text = page(EXAMPLES)
    for line in (
        "|plain decode, batch 1, ms per step|4.1 / 3.7|[3.80](",
        "/results/decode-h200.json)|reached|",
        "|price of strict, decode, batch 1-64, % more time|3 / 0|[6.40](",
        "over all configurations, runs|2000 / 2000|[2304](",
        "results/decode-h200.json)|3.80|3.80|3.80|3.80|3.80|",
        "at the commit of pushed weights, ipc, ms|25 / 20|[21.50](",
        "|25 / 20|[26.50](../benchmarks/results/weights-spooled.json)|short|",
        "|1000|disk|4.00|2.00x|4.00|97.00|",
        "|ipc|15.2|2.00|7.6|",
        "|256 clients at once, whole replies, against one batch, speculation off, x|0.88 / 0.95|"
        "[0.900](../benchmarks/results/load-h200.json)|reached|",
        "|off|streamed||11250|0.50x|10.0|",
        "|delay by an interrupted trainer|4.0|18.5|",
        "its 32 streams went on within 0.50 s, at most 0.25 s later than reading",
        "|full 256|off|28000|55000|1.96x|20 %|",
        "63 drains, 3000 moves of requests, and pushes (14 by disk, 7 by http): 0 of 168000",
        "take 1.10 times as long as to one (6.00 s). At most 30 ms from the first commit",
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
        decode("two leaves.json", 3.0, command="tlt bench decode --reduction-leaves 2"),
        decode("small.json", 0.5, shape={**SHAPE, "layers": 8}),
    ]
    answered = answer(goal("plain decode, batch 1"), comparable(found, goals()))
    assert answered is not None and (answered.value, answered.name) == (4.0, "new.json")


def test_goal_names_the_run_that_answers_the_goal() -> None:
    def rollout(name: str, **said: Any) -> Result:
        rows = rollout_figures({("512", "goodput"): [rollout_run(2.0)]}, "demo")
        return result(name, bench="rollout-http", **{**rows, **COMMON, "penalties": False, **said})

    found = [
        rollout("first.json", first_over_later=1.02),
        rollout("penalties.json", first_over_later=1.5, penalties=True),
    ]
    first = goal("first rollout after the start, against the same again at the end")
    answered = answer(first, found)
    assert answered is not None and (answered.value, answered.name) == (1.02, "first.json")


def test_push_rows_show_the_median_time_and_the_longest_pause() -> None:
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


def test_page_states_whether_pushes_were_spooled() -> None:
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
def test_goal_verdicts_follow_their_limits(what: str, value: float, expected: str) -> None:
    assert verdict(goal(what), value) == expected


def test_two_gpu_results_answer_only_two_gpu_goals() -> None:
    one, two = decode("one.json", 3.8), decode("two.json", 2.7, tensor_parallel=2)
    large = decode(
        "large.json", 9.0, tensor_parallel=2, shape=SHAPE | {"layers": 64, "hidden": 5120}
    )
    for what, name in (
        ("plain decode, batch 1", "one.json"),
        ("two GPUs: plain decode, batch 1", "two.json"),
        ("two GPUs: 32B, plain decode, batch 1", "large.json"),
    ):
        found = answer(goal(what), suited(goal(what), [one, two, large], goals()))
        assert found is not None and found.name == name


def test_goals_for_any_machine_are_answered_by_a_cpu() -> None:
    rows = [{"way": "whole", "tokens": 64, "over_single": 10.5}]
    about = {"bench": "frontend", "rows": rows}
    entry = {**EXAMPLES[0].entry, "machine": "2 cores", "figures": about}
    wanted = goal("the frontend: tokens per CPU-second, outputs of 64 tokens over one each")
    found = answer(wanted, suited(wanted, [Result("cpu.json", entry)], goals()))
    assert found is not None and found.value == 10.5
    decoding = goal("plain decode, batch 1")
    assert suited(decoding, [Result("cpu.json", entry)], goals()) == []


def test_rollouts_are_compared_seed_by_seed() -> None:
    said = page(EXAMPLES)
    assert "|512|goodput|2.50|25000|3.00x|1.25x|" in said, "medians of 4 and 2, of 1.5 and 1"
    assert "|512|off|7.00|8750|1.00x||" in said


TABLES = ("rows", "price", "prefill", "objectives", "recomputed", "layouts", "fleet")


def test_goals_ask_for_fields_that_benches_write() -> None:
    asked = {(g["bench"], g["field"]) for g in goals()["goals"]}
    written = {
        (r.bench, field)
        for r in (*results(RESULTS), *EXAMPLES)
        for part in (r.figures, *(row for of in TABLES for row in rows_of(r.figures, of)))
        for field in part
    }
    assert asked <= written


def test_result_files_share_one_form() -> None:
    for file in RESULTS.glob("*.json"):
        entry = json.loads(file.read_text())
        assert {"command", "commit", "date", "machine", "versions", "figures"} <= set(entry), (
            file.name
        )
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", entry["date"])
