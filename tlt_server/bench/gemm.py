"""`tlt bench gemm`: all matmuls of one step as one CUDA graph, with bytes read per second, and
cuBLAS for comparison.

The model is a 7B on one GPU, or another `--shape` as one rank of `--tensor-parallel` has it, whose
peers are left out. cuBLAS runs the same matmuls without SiLU, in turns with ours; the step with the
two norms between the matmuls is timed, too. With several `--leaves`, steps with each number of
leaves in o and down projections take turns. So do weights in bfloat16 and in FP8 if that is asked
for; the library then has the same operands and scales, where it takes them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from tlt_server.bench.matmul_chain import (
    SAMPLED,
    Chain,
    Inputs,
    LoneRank,
    Widths,
    alone,
    library,
    step,
)
from tlt_server.bench.micro import READ_BYTES_PER_S, Call, captured, in_turns, measure
from tlt_server.bench.padding.shapes import SHAPES
from tlt_server.errors import StartupError
from tlt_server.models.gpu.matmuls import StrictMatmuls, takes_scales
from tlt_server.models.gpu.sums import OWN_SUMS
from tlt_server.models.split import GPU_LEAVES
from tlt_server.settings.server import SPLITS

Run = tuple[bool, str, int]  # whether weights are quantised, what runs, leaves


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
    widths = Widths.of(shape, ranks)
    both = (widths, widths.in_fp8()) if args.quantization == "fp8" else (widths,)
    rows = timed(both, args.rows, all_leaves, ranks)
    return measure(args, "products", rows, tensor_parallel=ranks, shape=sizes)


def timed(
    forms: Sequence[Widths], all_rows: Sequence[int], all_leaves: Sequence[int], ranks: int
) -> Iterator[dict[str, Any]]:
    """Yield figures of a rank with weights in each of these forms, the first of which is not
    quantised.
    """
    chains = [Chain(widths) for widths in forms]
    for rows in all_rows:
        runs: dict[Run, Call] = {}
        for chain in chains:
            runs |= _runs(chain, rows, all_leaves, ranks)
        ms = in_turns(runs)
        for widths in forms:
            for leaves in all_leaves:
                yield figures(widths, rows, leaves, ms)


def _runs(chain: Chain, rows: int, all_leaves: Sequence[int], ranks: int) -> dict[Run, Call]:
    widths = chain.widths
    inputs, runs = Inputs(widths, rows), dict[Run, Call]()
    if not widths.quantised or takes_scales(inputs.residual.device, rows):
        runs[widths.quantised, "cublas", 0] = captured(partial(library, chain, inputs))
    for leaves in all_leaves:
        own = leaves // ranks
        sums = OWN_SUMS if ranks == 1 else LoneRank(ranks, own, rows, widths.hidden)
        given = chain, inputs, StrictMatmuls(own), sums
        runs[widths.quantised, "step", leaves] = captured(partial(step, *given))
        runs[widths.quantised, "alone", leaves] = captured(partial(alone, *given))
    return runs


def figures(widths: Widths, rows: int, leaves: int, ms: Mapping[Run, float]) -> dict[str, Any]:
    form, floor_ms = widths.quantised, widths.bytes / READ_BYTES_PER_S * 1e3
    alone_ms = ms[form, "alone", leaves]
    found: dict[str, Any] = {"weights": "fp8"} if form else {}
    found |= {
        "rows": rows,
        "leaves": leaves,
        "step_ms": round(ms[form, "step", leaves], 4),
        "products_ms": round(alone_ms, 4),
        "floor_ms": round(floor_ms, 4),
        "of_floor": round(alone_ms / floor_ms, 3),
    }
    if (cublas_ms := ms.get((form, "cublas", 0))) is not None:
        found |= {"cublas_ms": round(cublas_ms, 4), "of_cublas": round(alone_ms / cublas_ms, 3)}
    if form:
        found["of_bfloat16"] = round(alone_ms / ms[False, "alone", leaves], 3)
    return {**found, **rates(widths, found)}


def rates(widths: Widths, figures: dict[str, Any]) -> dict[str, float]:
    """Return bytes read, their share of a copy's, and operations per second of only the matmuls."""
    rows, alone_ms = figures["rows"], figures["products_ms"]
    flops = 2 * (rows * widths.elements + min(rows, SAMPLED) * widths.vocabulary * widths.hidden)
    return {
        "TB/s": round(widths.bytes / alone_ms / 1e9, 2),
        "of_memory": round(widths.bytes / alone_ms * 1e3 / READ_BYTES_PER_S, 3),
        "TFLOP/s": round(flops / alone_ms / 1e9),
    }
