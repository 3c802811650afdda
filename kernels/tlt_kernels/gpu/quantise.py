"""FP8 operands of a matmul: a weight with one scale per block of 128 x 128, and rows of x with one
scale per 128 inputs.

The rule of a scale is that of `tlt_client.quantise`: the smallest power of two s with m / s <= 464,
for the largest magnitude m. It depends on the row's own values alone, so a row has the same bits in
any company. Kernels that have a row, or 128 of its values, in registers write it quantised
(`put_row`, `put_heads`); `quantise_rows` is for the others.

Legend: M rows, N outputs, K inputs, G = K / 128, W rows of x padded for the copy engine.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt_kernels.gpu.target import INTERPRETED, PDL, pdl_launch, pdl_wait

BLOCK = 128
E4M3 = torch.float8_e4m3fn
ROW_UNIT = 32  # rows of scales that a copy takes at least: 128 bytes
_BLOCK = tl.constexpr(BLOCK)
_SECTOR = 8  # rows whose scales a memory transaction writes together


class Matrix(NamedTuple):
    """A weight as matmuls take it: in the model's type, or e4m3 with scales."""

    values: Tensor  # [N, K]
    scales: Tensor | None = None  # float32 [ceil(N / 128), G]

    def rows(self, first: int, end: int | None = None) -> Matrix:
        """Return the outputs from `first` on, which begin at a whole block if there are scales."""
        if self.scales is None:
            return Matrix(self.values[first:end])
        assert first % BLOCK == 0, "a part of a quantised weight begins at a whole block"
        last = None if end is None else -(-end // BLOCK)
        return Matrix(self.values[first:end], self.scales[first // BLOCK : last])


class Quantised(NamedTuple):
    """Rows of x in e4m3. Scales of rows beyond M are undefined."""

    values_MK: Tensor
    scales_GW: Tensor  # float32


Rows = TypeVar("Rows", bound=Tensor | Quantised)  # what a kernel writes, and returns


def places(out: Tensor | Quantised) -> tuple[Tensor, Tensor | None, int]:
    """Return what `put_row` takes: values, scales and their width W."""
    return (*out, out.scales_GW.shape[1]) if isinstance(out, Quantised) else (out, None, 0)


@triton.jit
def scale_of(top):
    """Return the scales of float32 magnitudes; 1 where all values would become 0."""
    exponent = ((top.to(tl.int32, bitcast=True) + 0x17FFFF) >> 23) - 8
    scale = (tl.maximum(exponent, 27) << 23).to(tl.float32, bitcast=True)  # at least 2^-100
    return tl.where(top <= 7.703719777548943e-34, 1.0, scale)  # 2^-110


@triton.jit
def scaled(x, scale):
    """Return x / scale in e4m3: rounded to nearest even and saturated. NaN stays. `scale`: powers
    of two.
    """
    inverse = ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    y = tl.maximum(x * inverse, -448.0, propagate_nan=tl.PropagateNan.ALL)
    y = tl.minimum(y, 448.0, propagate_nan=tl.PropagateNan.ALL)
    found = y.to(tl.float8e4nv)
    if INTERPRETED:  # its conversion neither rounds subnormals as a GPU does nor keeps NaN
        size = tl.abs(y)
        bits = tl.maximum(size, 0.015625).to(tl.int32, bitcast=True) & 0x7F800000
        unit = (bits + (20 << 23)).to(tl.float32, bitcast=True) * 1.5
        sign = y.to(tl.int32, bitcast=True) & -0x80000000
        rounded = ((size + unit) - unit).to(tl.int32, bitcast=True) | sign
        byte = rounded.to(tl.float32, bitcast=True).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        found = tl.where(y == y, byte, 0x7F).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return found


@triton.jit
def quantised(x, like, BLOCKS: tl.constexpr):
    """Return x, rounded to the type that `like` points to, as e4m3 [BLOCKS, 128], and its scales
    [BLOCKS].
    """
    x_B128 = tl.reshape(x.to(like.dtype.element_ty).to(tl.float32), [BLOCKS, _BLOCK])
    scale_B = scale_of(tl.max(tl.abs(x_B128), axis=1))
    return scaled(x_B128, scale_B[:, None]), scale_B


@triton.jit
def put_row(
    x, values, scales_GW, W, row, at, h, inside, like, H: tl.constexpr, BLOCK: tl.constexpr
):
    """Store a row that begins at `at`: quantised if there are scales. x is 0 beyond H; `like`: a
    pointer to the type of rows that are not quantised.
    """
    if scales_GW is None:
        tl.store(values + at + h, x.to(values.dtype.element_ty), mask=inside)
    else:
        value_B128, scale_B = quantised(x, like, BLOCK // _BLOCK)
        g_B = tl.arange(0, BLOCK // _BLOCK)
        k_B128 = g_B[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
        tl.store(values + at + k_B128, value_B128, mask=k_B128 < H)
        tl.store(scales_GW + g_B * W + row, scale_B, mask=g_B < H // _BLOCK)


@triton.jit
def put_heads(
    x_MD, values, scales_GW, W, row, size, head, like,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Store attention's outputs of `size` rows from `row` on, GROUP query heads each from that of
    the KV head on, quantised. GROUP * D is a multiple of 128.
    """
    BLOCKS: tl.constexpr = x_MD.shape[0] * D // _BLOCK
    value_B128, scale_B = quantised(x_MD, like, BLOCKS)
    b_B, k_K = tl.arange(0, BLOCKS), tl.arange(0, _BLOCK)
    per_row: tl.constexpr = GROUP * D // _BLOCK
    row_B, g_B = row + b_B // per_row, head * per_row + b_B % per_row
    mask_B = b_B // per_row < size
    at_BK = row_B.to(tl.int64)[:, None] * (HEADS * D) + g_B[:, None] * _BLOCK + k_K[None, :]
    tl.store(values + at_BK, value_B128, mask_B[:, None])
    tl.store(scales_GW + g_B * W + row_B, scale_B, mask_B)


@triton.jit(do_not_specialize=["M"])
def _quantise(x_MK, values_MK, scales_GW, M, K, W, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Quantise ROWS rows of GROUPS groups of 128 per program."""
    pdl_launch()
    i = tl.arange(0, ROWS * GROUPS)
    row, g = tl.program_id(0) * ROWS + i % ROWS, tl.program_id(1) * GROUPS + i // ROWS
    inside = (row < M) & (g * _BLOCK < K)
    at = row.to(tl.int64)[:, None] * K + (g * _BLOCK)[:, None] + tl.arange(0, _BLOCK)[None, :]
    pdl_wait()
    x = tl.load(x_MK + at, inside[:, None], 0.0)
    values, scale = quantised(x, x_MK, ROWS * GROUPS)
    tl.store(values_MK + at, values, inside[:, None])
    tl.store(scales_GW + g * W + row, scale, inside)


def empty_rows(rows: int, inputs: int, device: torch.device) -> Quantised:
    """Return rows to be filled. `inputs`: a multiple of 128."""
    assert inputs % BLOCK == 0, f"{inputs} inputs are no multiple of {BLOCK}"
    padded = -(-rows // ROW_UNIT) * ROW_UNIT
    return Quantised(
        torch.empty(rows, inputs, dtype=E4M3, device=device),
        torch.empty(inputs // BLOCK, padded, dtype=torch.float32, device=device),
    )


def quantise_rows(x_MK: Tensor) -> Quantised:
    """Return the rows in e4m3, each with its own scales."""
    rows, inputs = x_MK.shape
    out = empty_rows(rows, inputs, x_MK.device)
    assert x_MK.is_contiguous()
    if rows:
        together, groups = (1, 16) if rows < 2 * _SECTOR else (_SECTOR, 4)
        grid = triton.cdiv(rows, together), triton.cdiv(inputs // BLOCK, groups)
        _quantise[grid](
            x_MK, *out, rows, inputs, out.scales_GW.shape[1], together, groups, num_warps=4, **PDL
        )
    return out
