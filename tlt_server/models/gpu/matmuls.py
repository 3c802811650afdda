"""Matmuls on a GPU by numerics: `strict` adds in an order fixed by the weight's shape, `fast` in
the quickest order.

Legend: M rows, K inputs, N outputs, I intermediate, P partial sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from tlt_kernels.gpu import gemm
from tlt_kernels.gpu.gemm_tiles import LEAVES
from tlt_kernels.gpu.quantise import BLOCK, Matrix, Quantised, quantise_rows
from tlt_server.models.numerics import Mode
from tlt_server.models.split import Split

# Up to here matmuls wait for weights, which our kernels read sooner than the library does.
FEW_ROWS = 64
SCALED_ROWS = 4  # the library's rows in FP8 are a multiple: their scales begin at 16 bytes
WHOLE = Split(LEAVES)  # on one GPU, in the fewest leaves


class Room(NamedTuple):
    """Memory for partial sums."""

    floats: Tensor  # float32, of which they take the beginning
    parts: int  # how many there are at least, if there are as many leaves


@dataclass(frozen=True)
class StrictMatmuls:
    leaves: int = LEAVES  # another number gives `partials` other bits

    linear = staticmethod(gemm.linear)
    gated = staticmethod(gemm.gated)

    def of_rank(self, split: Split) -> Self:
        """Return the matmuls of a target's shard, with the reduction segments of one rank."""
        return replace(self, leaves=split.leaves // split.of)

    def partials(
        self, x: Tensor | Quantised, weight: Matrix, *, room: Room | None = None
    ) -> Tensor:
        """Return partial sums [P, M, N], in `room` if given. Added as a binary tree over the first
        axis, they give x @ weight.T.
        """
        if room is None:
            return gemm.partials(x, weight, leaves=self.leaves)
        return gemm.partials(x, weight, leaves=self.leaves, parts=room.parts, room=room.floats)


class FastMatmuls(StrictMatmuls):
    """The quicker of two ways: the library for unfused matmuls of many rows, else our kernels. In
    FP8 the library has the same operands and scales.
    """

    @staticmethod
    def linear(
        x: Tensor | Quantised,
        weight: Matrix,
        bias_N: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        out_MN: Tensor | None = None,
    ) -> Tensor:
        found_MN = _library(x, weight, bias_N, out_dtype)
        if found_MN is None:
            return StrictMatmuls.linear(x, weight, bias_N, out_dtype=out_dtype, out_MN=out_MN)
        return found_MN if out_MN is None else out_MN.copy_(found_MN)

    def partials(
        self, x: Tensor | Quantised, weight: Matrix, *, room: Room | None = None
    ) -> Tensor:
        assert room is None, "the library's sums are not exchanged"
        found_MN = _library(x, weight)
        return super().partials(x, weight) if found_MN is None else found_MN[None]


def _library(
    x: Tensor | Quantised,
    weight: Matrix,
    bias_N: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | None:
    """Return the library's result; None where our kernels are used. It rounds sums to the type of
    unquantised inputs.
    """
    rows, dtype = (x.values_MK, torch.bfloat16) if isinstance(x, Quantised) else (x, x.dtype)
    if len(rows) <= FEW_ROWS or out_dtype not in (None, dtype):
        return None
    if weight.scales is not None:
        if not takes_scales(rows.device, len(rows)):
            return None
        x = quantise_rows(x) if isinstance(x, Tensor) else x
    return by_library(x, weight, bias_N)


def takes_scales(device: torch.device, rows: int) -> bool:
    """Return True if the library multiplies this many rows in FP8."""
    return has_block_scales(device) and rows % SCALED_ROWS == 0


@cache
def has_block_scales(device: torch.device) -> bool:
    """Return True if the library multiplies with scales of 1 x 128 by 128 x 128: on a GPU of
    compute capability 9.0, from CUDA 12.9 on.
    """
    x = torch.zeros(BLOCK, BLOCK, dtype=torch.bfloat16, device=device)
    rows = quantise_rows(x)
    try:
        by_library(rows, Matrix(rows.values_MK, x.new_ones(1, 1, dtype=torch.float32)))
    except (AttributeError, RuntimeError, ValueError):
        return False
    return True


def by_library(x: Tensor | Quantised, weight: Matrix, bias_N: Tensor | None = None) -> Tensor:
    """Multiply x in the weight's form. The library's scales of rows lie side by side, without
    padding, and those of a weight's blocks of 128 outputs begin at multiples of four.
    """
    scales = weight.scales
    if isinstance(x, Tensor):
        return functional.linear(x, weight.values, bias_N)
    assert scales is not None
    if missing := -scales.shape[1] % 4:
        scales = functional.pad(scales, (0, missing))
    return functional.scaled_mm(
        x.values_MK,
        weight.values.T,
        x.scales_GW[:, : len(x.values_MK)].contiguous().T,
        functional.ScalingType.BlockWise1x128,
        scales.T,
        functional.ScalingType.BlockWise128x128,
        bias=bias_N,
        output_dtype=torch.bfloat16,
    )


MATMULS: dict[Mode, type[StrictMatmuls]] = {"strict": StrictMatmuls, "fast": FastMatmuls}
