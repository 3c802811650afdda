"""`tlt bench gemm`: all matmuls of one step as one CUDA graph, with bytes read per second, and
cuBLAS for comparison.

The model is a 7B on one GPU, or another `--shape` as one rank of `--tensor-parallel` has it, whose
peers are left out. cuBLAS runs the same matmuls without SiLU, in turns with ours; the step with the
two norms between the matmuls is timed, too. With several `--leaves`, steps with each number of
leaves in o and down projections take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from tlt_server.bench.graph_time import captured, in_turns, require_gpu
from tlt_server.bench.matmul_chain import (
    SAMPLED,
    Chain,
    Inputs,
    LoneRank,
    Widths,
    alone,
    cublas,
    step,
)
from tlt_server.bench.micro import READ_BYTES_PER_S, say
from tlt_server.bench.padding.shapes import SHAPES
from tlt_server.bench.record import finish
from tlt_server.errors import StartupError
from tlt_server.models.gpu.matmuls import StrictMatmuls
from tlt_server.models.gpu.sums import OWN_SUMS
from tlt_server.models.split import GPU_LEAVES
from tlt_server.settings.server import SPLITS


def run(args: argparse.Namespace) -> int:
    ranks, shape = args.tensor_parallel, SHAPES[args.shape]
    works = [count for count in SPLITS if count >= ranks and shape.heads % count == 0]
    all_leaves = args.leaves or (max(GPU_LEAVES, ranks),)
    if unsuited := [leaves for leaves in all_leaves if leaves not in works]:
        named = f"--leaves {' or '.join(map(str, works))}" if works else "fewer ranks"
        raise StartupError(
            f"--leaves is {unsuited[0]} and --tensor-parallel {ranks}, and {args.shape} has "
            f"{shape.heads} heads: every rank has as many leaves, each of whole heads; use {named}"
        )
    require_gpu()
    chain = Chain(Widths.of(shape, ranks))
    found = []
    for rows in args.rows:
        for figures in _timed(chain, rows, all_leaves, ranks):
            found.append(figures)
            say({**figures, **rates(chain.widths, figures)})
    sizes = {"layers": shape.layers, "hidden": shape.hidden}
    figures = {"bench": "products", "tensor_parallel": ranks, "shape": sizes, "rows": found}
    finish(args, figures, on_gpu=True)
    return 0


def _timed(
    chain: Chain, rows: int, all_leaves: tuple[int, ...], ranks: int
) -> list[dict[str, Any]]:
    inputs = Inputs(chain.widths, rows)
    runs: dict[tuple[str, int], Callable[[], object]] = {
        ("cublas", 0): captured(partial(cublas, chain, inputs))
    }
    for leaves in all_leaves:
        matmuls = StrictMatmuls(leaves // ranks)
        sums = (
            OWN_SUMS if ranks == 1 else LoneRank(ranks, leaves // ranks, rows, chain.widths.hidden)
        )
        runs["step", leaves] = captured(partial(step, chain, inputs, matmuls, sums))
        runs["alone", leaves] = captured(partial(alone, chain, inputs, matmuls, sums))
    ms = in_turns(runs)
    floor_ms = chain.widths.bytes / READ_BYTES_PER_S * 1e3
    return [
        {
            "rows": rows,
            "leaves": leaves,
            "step_ms": round(ms["step", leaves], 4),
            "products_ms": round(ms["alone", leaves], 4),
            "floor_ms": round(floor_ms, 4),
            "cublas_ms": round(ms["cublas", 0], 4),
            "of_floor": round(ms["alone", leaves] / floor_ms, 3),
            "of_cublas": round(ms["alone", leaves] / ms["cublas", 0], 3),
        }
        for leaves in all_leaves
    ]


def rates(widths: Widths, figures: dict[str, Any]) -> dict[str, float]:
    """Return bytes read and operations per second of the matmuls alone."""
    rows, alone_ms = figures["rows"], figures["products_ms"]
    flops = 2 * (rows * widths.elements + min(rows, SAMPLED) * widths.vocabulary * widths.hidden)
    return {
        "TB/s": round(widths.bytes / alone_ms / 1e9, 2),
        "TFLOP/s": round(flops / alone_ms / 1e9),
    }
