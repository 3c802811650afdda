"""LoRA: adds scale * (x A^T) B^T to the rows of a matmul's result, by the adapter of each row.

Rows of one adapter are gathered into tiles of 16. The bits of a row depend on that row and its
adapter alone: K is cut into segments of one size, k ascends within a segment, segments are added in
order, and tensor cores add in the same order in every tile. A row without an adapter is not
touched. The adapters of all slots lie side by side at fixed addresses, their ranks padded with
zeros.

Legend: M rows, K inputs, N outputs of a fused map, r padded rank, X = r times the parts of the
fused map, P segments of K, S slots, Q batch slots, I intermediate; BM, BN, BX, BK tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt_kernels.gpu.silu import silu
from tlt_kernels.gpu.target import PDL, dot, pdl_launch, pdl_wait
from tlt_kernels.gpu.tensors import RowTable

ROWS = 16  # rows of a tile
SEGMENT = 1024  # inputs that one program adds up
MIN_RANK = 16  # products that a tensor core adds at once
MAX_PARTS = 3


class AdapterRows(NamedTuple):
    """The rows of a step by slot of their adapter: the first `count_S[s]` of `row_SM[s]`."""

    row_SM: Tensor
    count_S: Tensor

    @staticmethod
    def allocate(slots: int, rows: int, *, device: str = "cuda") -> AdapterRows:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return AdapterRows(zeros(slots, rows), zeros(slots))


def tile_columns(parts: tuple[int, ...]) -> int:
    """Return the columns of an output tile, which lies within one part; a power of two."""
    widest = 128
    while any(width % widest for width in parts):
        widest //= 2
    return widest


@triton.jit(do_not_specialize=["M"])
def _find(position_R, batch_slot_R, adapter_Q, row_SM, count_S, M, BLOCK: tl.constexpr):
    s, i_I = tl.program_id(0), tl.arange(0, BLOCK)
    pdl_wait()
    pdl_launch()
    found = 0
    for done in range(0, M, BLOCK):
        row_I = done + i_I
        live_I = tl.load(position_R + row_I, mask=row_I < M, other=-1) >= 0
        batch_slot_I = tl.load(batch_slot_R + row_I, mask=live_I, other=0)
        own_I = live_I & (tl.load(adapter_Q + batch_slot_I, mask=live_I, other=-1) == s)
        one_I = own_I.to(tl.int32)
        tl.store(row_SM + s * M + found + tl.cumsum(one_I, 0) - one_I, row_I, mask=own_I)
        found += tl.sum(one_I, 0)
    tl.store(count_S + s, found)


def find_rows(rows: RowTable, adapter_Q: Tensor, found: AdapterRows) -> None:
    """Sort the live rows of a step by the slot of their adapter."""
    slots, count = found.row_SM.shape
    assert len(rows.position_R) == count
    _find[(slots,)](
        rows.position_R, rows.batch_slot_R, adapter_Q, *found, count, BLOCK=1024, num_warps=4, **PDL
    )


@triton.jit(do_not_specialize=["M"])
def _shrink(
    x_MK, a_SXK, row_SM, count_S, low_PMX, M, K, X,
    SEGMENT: tl.constexpr, BM: tl.constexpr, BX: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Multiply one tile of rows by one tile of A over one segment of K. The tiles of X and the
    segments share an axis of the grid.
    """
    x_tiles = tl.cdiv(X, BX)
    s, p = tl.program_id(2), tl.program_id(1) // x_tiles
    first, x_I = p * SEGMENT, tl.program_id(1) % x_tiles * BX + tl.arange(0, BX)
    at_J = tl.program_id(0) * BM + tl.arange(0, BM)
    pdl_wait()
    count = tl.load(count_S + s)
    if tl.program_id(0) * BM < count:
        row_J = tl.load(row_SM + s * M + at_J, mask=at_J < count, other=0).to(tl.int64)
        a_I = a_SXK + (s.to(tl.int64) * X + x_I[:, None]) * K
        x_J = x_MK + row_J[:, None] * K
        total_IJ = tl.zeros((BX, BM), tl.float32)
        for k in range(first, first + SEGMENT, BK):
            k_L = k + tl.arange(0, BK)
            inside_L = k_L[None, :] < K
            a_IL = tl.load(a_I + k_L[None, :], mask=(x_I < X)[:, None] & inside_L, other=0.0)
            x_JL = tl.load(x_J + k_L[None, :], mask=(at_J < count)[:, None] & inside_L, other=0.0)
            total_IJ = dot(a_IL, x_JL.T, total_IJ)
        low = low_PMX + (p.to(tl.int64) * M + row_J[:, None]) * X + x_I[None, :]
        tl.store(low, total_IJ.T, mask=(at_J < count)[:, None] & (x_I < X)[None, :])
    pdl_launch()


@triton.jit(do_not_specialize=["M"])
def _expand(
    low_PMX, b_SNr, scale_S, row_SM, count_S, out_MN, M, N, X, P, FIRST1, FIRST2,
    r: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add one tile of the result. The parts of the fused map begin at columns 0, FIRST1, FIRST2."""
    s, first = tl.program_id(2), tl.program_id(1) * BN
    part = (first >= FIRST1).to(tl.int32) + (first >= FIRST2).to(tl.int32)
    n_I, at_J, x_L = (
        first + tl.arange(0, BN),
        tl.program_id(0) * BM + tl.arange(0, BM),
        tl.arange(0, r),
    )
    pdl_wait()
    count = tl.load(count_S + s)
    if tl.program_id(0) * BM < count:
        live_J = at_J < count
        row_J = tl.load(row_SM + s * M + at_J, mask=live_J, other=0).to(tl.int64)
        low_JL = tl.zeros((BM, r), tl.float32)
        for p in range(0, P):
            at = low_PMX + (p * M + row_J[:, None]) * X + part * r + x_L[None, :]
            low_JL += tl.load(at, mask=live_J[:, None], other=0.0)
        low_JL *= tl.load(scale_S + s)
        b_IL = tl.load(b_SNr + (s.to(tl.int64) * N + n_I[:, None]) * r + x_L[None, :])
        added_IJ = dot(b_IL, low_JL.to(b_IL.dtype).T, tl.zeros((BN, BM), tl.float32))
        out = out_MN + row_J[:, None] * N + n_I[None, :]
        sum_JI = tl.load(out, mask=live_J[:, None], other=0.0).to(tl.float32) + added_IJ.T
        tl.store(out, sum_JI.to(out_MN.dtype.element_ty), mask=live_J[:, None])
    pdl_launch()


def add_lora(
    x_MK: Tensor,
    a_SXK: Tensor,
    b_SNr: Tensor,
    scale_S: Tensor,
    parts: tuple[int, ...],
    rows: AdapterRows,
    out_MN: Tensor,
) -> None:
    """Add to `out_MN` (x's dtype or float32) what the adapters of its rows make of `x_MK`. `parts`:
    outputs of the maps that are fused, in order; each has `r` rows of A.
    """
    (count, inputs), (slots, outputs, rank) = x_MK.shape, b_SNr.shape
    width, segments = a_SXK.shape[1], triton.cdiv(inputs, SEGMENT)
    assert len(parts) <= MAX_PARTS and width == rank * len(parts) and sum(parts) == outputs
    assert out_MN.shape == (count, outputs) and out_MN.is_contiguous() and x_MK.is_contiguous()
    if not count:
        return
    low_PMX = torch.empty(segments, count, width, dtype=torch.float32, device=x_MK.device)
    row_tiles, columns = triton.cdiv(count, ROWS), min(64, triton.next_power_of_2(width))
    _shrink[(row_tiles, segments * triton.cdiv(width, columns), slots)](
        x_MK,
        a_SXK,
        *rows,
        low_PMX,
        count,
        inputs,
        width,
        SEGMENT=SEGMENT,
        BM=ROWS,
        BX=columns,
        BK=128,
        num_warps=4,
        num_stages=3,
        **PDL,
    )
    ends = [sum(parts[: i + 1]) for i in range(len(parts))]
    first, second = (*ends[:-1], outputs, outputs)[:2]
    tile = tile_columns(parts)
    _expand[(row_tiles, outputs // tile, slots)](
        low_PMX,
        b_SNr,
        scale_S,
        *rows,
        out_MN,
        count,
        outputs,
        width,
        segments,
        first,
        second,
        r=rank,
        BM=ROWS,
        BN=tile,
        num_warps=4,
        **PDL,
    )


@triton.jit
def _silu_mul(gate_up_MX, out_MI, width, BLOCK: tl.constexpr):
    m, i_L = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_L = i_L < width
    pdl_wait()
    pdl_launch()
    gate_L = tl.load(gate_up_MX + m * 2 * width + i_L, mask=inside_L, other=0.0)
    up_L = tl.load(gate_up_MX + m * 2 * width + width + i_L, mask=inside_L, other=0.0)
    result_L = silu(gate_L) * up_L
    tl.store(out_MI + m * width + i_L, result_L.to(out_MI.dtype.element_ty), mask=inside_L)


def silu_mul(gate_up_MX: Tensor, dtype: torch.dtype) -> Tensor:
    """Return silu(gate) * up of float32 rows [gate | up], rounded once, as `gemm.gated` does."""
    rows, inputs = len(gate_up_MX), gate_up_MX.shape[1] // 2
    assert gate_up_MX.dtype == torch.float32 and gate_up_MX.is_contiguous()
    out_MI = torch.empty(rows, inputs, dtype=dtype, device=gate_up_MX.device)
    if rows:
        _silu_mul[(rows, triton.cdiv(inputs, 1024))](
            gate_up_MX, out_MI, inputs, BLOCK=1024, num_warps=4, **PDL
        )
    return out_MI
