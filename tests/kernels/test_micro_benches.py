"""Kernels that the micro benches time launch on any shape, and every figure has its calls."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_tests import DEVICE

# isort: split
from importlib import import_module

from tlt_kernels.gpu.tensors import RowTable
from tlt_server.bench import norms
from tlt_server.bench.arguments import BENCHES
from tlt_server.bench.attention import LayerCase, case_of
from tlt_server.bench.gemm import rates
from tlt_server.bench.matmul_chain import Widths
from tlt_server.bench.micro import Call, Case, TimedCalls, each, row_of
from tlt_server.bench.padding.shapes import SHAPES
from tlt_server.bench.sampling import SamplingBench
from tlt_server.bench.trees import TreeCase, calls, followed

SAMPLING = SamplingBench(vocabulary=300, drafts=100, seen=9, device=DEVICE)


def once(case: Case) -> dict[str, object]:
    """Run each figure's calls with a clock that stands still at its number of calls."""
    return row_of(case, clock=lambda run: run() or 12.0)


@pytest.mark.parametrize(
    "case",
    [
        TreeCase(1, 7, 4, 32, 100),
        TreeCase(3, 3, 1, 12, 100),
        pytest.param(TreeCase(9, 2, 2, 36, 40), marks=pytest.mark.soak),
    ],
)
def test_every_part_of_a_tree_runs_twice(case: TreeCase) -> None:
    parts = calls(case, layers=2, device=DEVICE)
    assert set(parts) == {"tree", "rows", "walk", "KV", "history", "branches"}
    for call in 2 * list(parts.values()):
        call()


def test_samples_follow_the_first_child() -> None:
    rows = RowTable.allocate(4, 2, device="cpu")
    rows.parent_R[:] = torch.tensor([-1, 0, 0, 1])
    rows.token_R[:] = torch.tensor([5, 6, 7, 8])
    assert followed(rows, 4).tolist() == [6, 8, 0, 0]


def test_figures_are_mean_times_of_calls_that_take_turns() -> None:
    seen: list[str] = []
    turns: list[Call] = [lambda: seen.append("a"), lambda: seen.append("b")]
    case = Case(
        {"case": "x"}, {"us": each(turns, 3), "plan_us": TimedCalls(lambda: None, 8)}, {"m": 1}
    )
    assert once(case) == {"case": "x", "us": 4.0, "plan_us": 1.5, "m": 1}
    assert seen == ["a", "b", "a"]


def test_norms_name_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "CALLS", 2)
    rows = [once(case) for case in norms.cases((3,), hidden=64, vocabulary=50, device=DEVICE)]
    assert [row["norm"] for row in rows] == [
        "rms_norm",
        "add_rms_norm",
        "embed_rms_norm",
        "embed_norms",
    ]
    assert all(row["us"] == 6.0 and row["rows"] == 3 for row in rows)


@pytest.mark.parametrize(
    "case",
    [
        lambda: SAMPLING.sample("sample 2", 2),
        lambda: SAMPLING.sample("sample 2 all, even", 2, {"top_p": 0.9, "top_k": 9, "min_p": 0.01}),
        lambda: SAMPLING.score(2, 1, 3),
        lambda: SAMPLING.edit(2),
        lambda: SAMPLING.children(2, 2),
    ],
    ids=["sample", "filtered", "score", "edit", "children"],
)
def test_sampling_cases_run(case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlt_server.bench.sampling.CALLS", 2)
    assert once(case())["us"] == 6.0


@pytest.mark.parametrize("step", [LayerCase(2, 40, 1), LayerCase(1, 33, 9)])
def test_attention_of_a_step_runs(step: LayerCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlt_server.bench.attention.PLANS", 2)
    row = once(case_of("x", step, 16, DEVICE, layers=2))
    assert (row["us"], row["rope_us"], row["plan_us"]) == (6.0, 6.0, 6.0)
    assert row["row_items"] or row["tile_items"]


def test_matmuls_of_a_rank_read_its_share_of_the_weights() -> None:
    one, half = (Widths.of(SHAPES["qwen2.5-7b"], ranks) for ranks in (1, 2))
    layer = 3584 * ((28 + 2 * 4) * 128 + 28 * 128 + 3 * 18944)
    assert one.elements == 28 * layer and half.elements == 14 * layer
    assert one.bytes == 2 * (one.elements + 3584 * 152_064)
    found = rates(one, {"rows": 8, "products_ms": 4.0})
    assert found["TB/s"] == round(one.bytes / 4e9, 2)
    assert found["TFLOP/s"] == round(8 * one.bytes / 4e9)


def test_every_bench_is_importable_without_a_gpu() -> None:
    for name, bench in BENCHES.items():
        assert callable(import_module(f"tlt_server.bench.{bench.module or name}").run)
