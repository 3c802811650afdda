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
from tlt_server.bench.micro import Call, Case, each, floor_us, measure

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
        values = rows * hidden
        moved = {  # bytes by one call
            "rms_norm": values * (4 + 2),
            "add_rms_norm": values * (4 * PARTS + 8 + 2),
            "embed_rms_norm": values * (2 + 4 + 2),
            "embed_norms": values * (2 + 4 + 4),
        }
        for name, call in calls(rows, weight, embedding).items():
            floor = {"floor_us": floor_us(moved[name])}
            yield Case({"norm": name, "rows": rows}, {"us": each(call, CALLS)}, floor)


def calls(rows: int, weight: torch.Tensor, embedding: torch.Tensor) -> dict[str, list[Call]]:
    """Return each norm, on different tensors."""
    device, (vocabulary, hidden) = weight.device, embedding.shape

    def rotated(make: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        return [make() for _ in range(ROTATED)]

    parts = rotated(lambda: torch.randn(PARTS, rows, hidden, device=device))
    residuals = rotated(lambda: torch.randn(rows, hidden, device=device))
    tokens = rotated(
        lambda: torch.randint(0, vocabulary, (rows,), device=device, dtype=torch.int32)
    )
    return {
        "rms_norm": [partial(rms_norm, x, weight, EPS) for x in residuals],
        "add_rms_norm": [
            partial(add_rms_norm, p, x, weight, EPS) for p, x in zip(parts, residuals, strict=True)
        ],
        "embed_rms_norm": [partial(embed_rms_norm, t, embedding, weight, EPS) for t in tokens],
        "embed_norms": [
            partial(embed_norms, t, embedding, weight, x, weight, EPS)
            for t, x in zip(tokens, residuals, strict=True)
        ],
    }


def run(args: argparse.Namespace) -> int:
    return measure(args, "norms", cases(), shape={"hidden": HIDDEN})
