"""`tlt bench norms`: time of the norms between matmuls on one GPU, at Qwen2.5-7B's width, and the
time to move their bytes, which few rows, whose tensors stay in the cache, may be below.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch

from tlt_kernels.gpu.gemm_tiles import PARTS
from tlt_kernels.gpu.norm import add_rms_norm, embed_norms, embed_rms_norm, rms_norm
from tlt_server.bench.micro import Case, each, floor_us, measure, row_of

HIDDEN, VOCABULARY, EPS = 3584, 152_064, 1e-6
ROWS = (1, 8, 32, 64, 128, 256, 512, 2048, 8192)
CALLS, ROTATED = 56, 4


def cases(
    all_rows: tuple[int, ...] = ROWS,
    *,
    hidden: int = HIDDEN,
    vocabulary: int = VOCABULARY,
    device: str = "cuda",
) -> Iterator[Case]:
    weight = torch.ones(hidden, device=device).bfloat16()
    embedding = torch.randn(vocabulary, hidden, device=device).bfloat16()
    for rows in all_rows:
        for name, (moved, call) in norms(rows, weight, embedding).items():
            timed = {"us": each([partial(call, i) for i in range(ROTATED)], CALLS)}
            floor = {"floor_us": floor_us(moved * rows * hidden)}
            yield Case({"norm": name, "rows": rows}, timed, floor)


def norms(
    rows: int, weight: torch.Tensor, embedding: torch.Tensor
) -> dict[str, tuple[int, Callable[[int], object]]]:
    """Return the bytes that each norm moves per value, and its call on the i-th tensors."""
    device, (vocabulary, hidden) = weight.device, embedding.shape
    parts = torch.randn(ROTATED, PARTS, rows, hidden, device=device)
    x = torch.randn(ROTATED, rows, hidden, device=device)
    ids = torch.randint(0, vocabulary, (ROTATED, rows), device=device, dtype=torch.int32)
    both = weight, EPS
    return {
        "rms_norm": (4 + 2, lambda i: rms_norm(x[i], *both)),
        "add_rms_norm": (4 * PARTS + 8 + 2, lambda i: add_rms_norm(parts[i], x[i], *both)),
        "embed_rms_norm": (2 + 4 + 2, lambda i: embed_rms_norm(ids[i], embedding, *both)),
        "embed_norms": (2 + 4 + 4, lambda i: embed_norms(ids[i], embedding, weight, x[i], *both)),
    }


def run(args: argparse.Namespace) -> int:
    return measure(args, "norms", map(row_of, cases()), shape={"hidden": HIDDEN})
