"""Time of the norms between matmuls on one GPU, at Qwen2.5-7B's width: `tlt bench norms`.

A table, then one line of JSON: microseconds per call inside a CUDA graph of many calls over
rotating tensors, and the time to move their bytes at 4.3 TB/s, which few rows, whose tensors stay
in the cache, may be below.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch

from tlt_kernels.gpu.gemm_tiles import PARTS
from tlt_kernels.gpu.norm import add_rms_norm, embed_norms, embed_rms_norm, rms_norm
from tlt_server.bench.graph_time import microseconds, require_gpu
from tlt_server.bench.record import finish

HIDDEN, VOCABULARY, EPS = 3584, 152_064, 1e-6
ROWS = (1, 8, 32, 64, 128, 256, 512, 2048, 8192)
CALLS, ROTATED = 56, 4
BANDWIDTH = 4.3e12


def calls(rows: int) -> Iterator[tuple[str, list[Callable[[], object]], int]]:
    """(name, the same call on different tensors, bytes that one moves)."""
    weight, embedding = (
        torch.ones(HIDDEN, device="cuda").bfloat16(),
        torch.randn(VOCABULARY, HIDDEN, device="cuda").bfloat16(),
    )
    parts = [torch.randn(PARTS, rows, HIDDEN, device="cuda") for _ in range(ROTATED)]
    residuals = [torch.randn(rows, HIDDEN, device="cuda") for _ in range(ROTATED)]
    tokens = [
        torch.randint(0, VOCABULARY, (rows,), device="cuda", dtype=torch.int32)
        for _ in range(ROTATED)
    ]
    values = rows * HIDDEN
    yield "rms_norm", [partial(rms_norm, x, weight, EPS) for x in residuals], values * (4 + 2)
    yield (
        "add_rms_norm",
        [partial(add_rms_norm, p, x, weight, EPS) for p, x in zip(parts, residuals, strict=True)],
        values * (4 * PARTS + 8 + 2),
    )
    yield (
        "embed_rms_norm",
        [partial(embed_rms_norm, t, embedding, weight, EPS) for t in tokens],
        values * (2 + 4 + 2),
    )
    both = zip(tokens, residuals, strict=True)
    yield (
        "embed_norms",
        [partial(embed_norms, t, embedding, weight, x, weight, EPS) for t, x in both],
        values * (2 + 4 + 4),
    )


def time_us(rotated: list[Callable[[], object]]) -> float:
    def run() -> None:
        for call in itertools.islice(itertools.cycle(rotated), CALLS):
            call()

    return microseconds(run) / CALLS


def run(args: argparse.Namespace) -> int:
    require_gpu()
    found: list[dict[str, object]] = []
    for rows in ROWS:
        for name, rotated, moved in calls(rows):
            found.append(
                {
                    "norm": name,
                    "rows": rows,
                    "us": round(time_us(rotated), 2),
                    "floor_us": round(moved / BANDWIDTH * 1e6, 2),
                }
            )
            print(
                "{norm:16} {rows:6} {us:8.2f} us, floor {floor_us:8.2f}".format_map(found[-1]),
                flush=True,
            )
    finish(args, {"bench": "norms", "shape": {"hidden": HIDDEN}, "rows": found}, on_gpu=True)
    return 0
