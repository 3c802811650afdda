"""`tlt bench gemm`: all matmuls of one step as one CUDA graph, with bytes read per second, and
cuBLAS for comparison.

The model is a 7B on one GPU, or another `--shape` as one rank of `--tensor-parallel` has it, whose
peers are left out. cuBLAS runs the same matmuls without SiLU, in turns with ours; the step with the
two norms between the matmuls is timed, too. With several `--leaves`, steps with each number of
leaves in o and down projections take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

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
from tlt_server.bench.micro import READ_BYTES_PER_S, Call, captured, in_turns, measure
from tlt_server.bench.padding.shapes import SHAPES, Shape
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
    sizes = {"layers": shape.layers, "hidden": shape.hidden}
    rows = timed(shape, args.rows, all_leaves, ranks)
    return measure(args, "products", rows, tensor_parallel=ranks, shape=sizes)


def timed(
    shape: Shape, all_rows: Sequence[int], all_leaves: Sequence[int], ranks: int
) -> Iterator[dict[str, Any]]:
    chain = Chain(Widths.of(shape, ranks))
    floor_ms = chain.widths.bytes / READ_BYTES_PER_S * 1e3
    for rows in all_rows:
        ms = _times(chain, rows, all_leaves, ranks)
        for leaves in all_leaves:
            step_ms, alone_ms, cublas_ms = ms["step", leaves], ms["alone", leaves], ms["cublas", 0]
            figures = {
                "rows": rows,
                "leaves": leaves,
                "step_ms": round(step_ms, 4),
                "products_ms": round(alone_ms, 4),
                "floor_ms": round(floor_ms, 4),
                "cublas_ms": round(cublas_ms, 4),
                "of_floor": round(alone_ms / floor_ms, 3),
                "of_cublas": round(alone_ms / cublas_ms, 3),
            }
            yield {**figures, **rates(chain.widths, figures)}


def _times(
    chain: Chain, rows: int, all_leaves: Sequence[int], ranks: int
) -> dict[tuple[str, int], float]:
    inputs, hidden = Inputs(chain.widths, rows), chain.widths.hidden
    runs: dict[tuple[str, int], Call] = {("cublas", 0): captured(partial(cublas, chain, inputs))}
    for leaves in all_leaves:
        own = leaves // ranks
        sums = OWN_SUMS if ranks == 1 else LoneRank(ranks, own, rows, hidden)
        both = chain, inputs, StrictMatmuls(own), sums
        runs["step", leaves] = captured(partial(step, *both))
        runs["alone", leaves] = captured(partial(alone, *both))
    return in_turns(runs)


def rates(widths: Widths, figures: dict[str, Any]) -> dict[str, float]:
    """Return bytes read and operations per second of only the matmuls."""
    rows, alone_ms = figures["rows"], figures["products_ms"]
    flops = 2 * (rows * widths.elements + min(rows, SAMPLED) * widths.vocabulary * widths.hidden)
    return {
        "TB/s": round(widths.bytes / alone_ms / 1e9, 2),
        "TFLOP/s": round(flops / alone_ms / 1e9),
    }
