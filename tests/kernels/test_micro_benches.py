"""Sizes of the matmuls that benches time, and the modules of all benches."""

from __future__ import annotations

import tests.kernels.triton_tests  # noqa: F401 - chooses the interpreter where there is no GPU

# isort: split
from importlib import import_module

from tlt_server.bench.arguments import BENCHES
from tlt_server.bench.gemm import rates
from tlt_server.bench.matmul_chain import Widths
from tlt_server.bench.padding.shapes import SHAPES


def test_rank_matmuls_read_the_ranks_share_of_the_weights() -> None:
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
