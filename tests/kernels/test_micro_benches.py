"""Sizes of the matmuls that benches time, and the modules of all benches."""

from __future__ import annotations

from tests.kernels.triton_tests import DEVICE, gpu  # chooses the interpreter where there is no GPU

# isort: split
from importlib import import_module

import pytest

from benchmarks.sections.engine import matmuls
from tlt_server.bench.arguments import BENCHES
from tlt_server.bench.gemm import figures, rates, timed
from tlt_server.bench.matmul_chain import Widths
from tlt_server.bench.padding.shapes import SHAPES
from tlt_server.errors import StartupError


def test_rank_matmuls_read_the_ranks_share_of_the_weights() -> None:
    one, half = (Widths.of(SHAPES["qwen2.5-7b"], ranks) for ranks in (1, 2))
    layer = 3584 * ((28 + 2 * 4) * 128 + 28 * 128 + 3 * 18944)
    assert one.elements == 28 * layer and half.elements == 14 * layer
    assert one.bytes == 2 * (one.elements + 3584 * 152_064)
    found = rates(one, {"rows": 8, "products_ms": 4.0})
    assert found["TB/s"] == round(one.bytes / 4e9, 2)
    assert found["TFLOP/s"] == round(8 * one.bytes / 4e9)


def test_fp8_matmuls_are_told_over_bfloat16_and_the_library() -> None:
    plain = Widths.of(SHAPES["qwen2.5-7b"], 1)
    fp8 = plain.in_fp8()
    assert fp8.bytes == plain.elements + 2 * 3584 * 152_064
    ms = {(form, what, 2): 2.0 - form for form in (False, True) for what in ("step", "alone")}
    ms |= {(False, "cublas", 0): 4.0}
    rows = [figures(widths, 64, 2, ms) for widths in (plain, fp8)]
    rows.append(figures(fp8, 64, 2, {**ms, (True, "cublas", 0): 0.8}))
    assert [row.get("of_cublas") for row in rows] == [0.5, None, 1.25]
    assert [row.get("of_bfloat16") for row in rows] == [None, 0.5, 0.5]
    assert rows[1]["of_memory"] == round(fp8.bytes / 4.3e9, 3)
    [over, note, table] = matmuls({"shape": {"layers": 28, "hidden": 3584}, "rows": rows})
    assert over.endswith("by rows: 0.500 (64).") and note.startswith("FP8")
    assert [line.split("|")[4:6] for line in table.split("\n")[2:]] == [
        ["0.500", ""],
        ["0.500", "1.25"],
    ]


@gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_matmuls_in_both_forms_take_turns() -> None:
    widths = Widths(2, 1024, 1536, 1024, 2048, 4096)
    rows = list(timed((widths, widths.in_fp8()), (3, 96), (1, 2), 1))
    assert [(row["rows"], row["leaves"]) for row in rows] == [
        (count, leaves) for count in (3, 96) for _ in range(2) for leaves in (1, 2)
    ]
    assert ["of_bfloat16" in row for row in rows] == [False, False, True, True] * 2


def test_blocks_of_fp8_are_not_cut_between_ranks() -> None:
    widths = Widths.of(SHAPES["qwen2.5-7b"], 1)._replace(inner=2368)
    with pytest.raises(StartupError, match="inner is 2368 on a rank"):
        widths.in_fp8()


def test_every_bench_is_importable_without_a_gpu() -> None:
    for name, bench in BENCHES.items():
        assert callable(import_module(f"tlt_server.bench.{bench.module or name}").run)
