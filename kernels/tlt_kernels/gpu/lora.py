"""LoRA: adds scale * (x A^T) B^T to the rows of a matmul's result, by the adapter of each row.

`shrink` multiplies by A on its own stream while the matmul runs; `expand` multiplies by B and adds,
after both. Rows of one adapter are gathered into tiles of 16. The bits of a row depend only on that
row and its adapter: K is cut into segments of one size, k ascends within a segment, segments are
added in order, and tensor cores add in the same order in every tile. A row without an adapter is
not touched. The adapters of all slots lie side by side at fixed addresses, their ranks padded with
zeros.

Legend: M rows, K inputs, N outputs of a fused map, r padded rank, X = r times the parts of the
fused map, P segments of K, S slots, Q batch slots; BM, BN, BX, BK, BI tiles.
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
SEGMENT, LONG = 512, 8192  # inputs that one program adds up; twice as many of inputs this long
MIN_RANK = 16  # products that a tensor core adds at once
MAX_PARTS = 3
COLUMNS = 16  # rows of A that one program multiplies by
# Two stages of a program's operands leave room for a matmul's on the same multiprocessor.
DEPTH, STAGES = 128, 2


class AdapterRows(NamedTuple):
    """The rows of a step by slot of their adapter: the first `count_S[s]` of `row_SM[s]`. The last
    of the S slots has the rows without an adapter, dead rows included.
    """

    row_SM: Tensor
    count_S: Tensor

    @staticmethod
    def allocate(slots: int, rows: int, *, device: str = "cuda") -> AdapterRows:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return AdapterRows(zeros(slots + 1, rows), zeros(slots + 1))


def tile_columns(parts: tuple[int, ...]) -> int:
    """Return the columns of an output tile, which lies within one part; a power of two."""
    widest = 128
    while any(width % widest for width in parts):
        widest //= 2
    return widest


@triton.jit(do_not_specialize=["M"])
def _find(position_R, batch_slot_R, adapter_Q, row_SM, count_S, M, BLOCK: tl.constexpr):
    s, i_I = tl.program_id(0), tl.arange(0, BLOCK)
    slot = tl.where(s < tl.num_programs(0) - 1, s, -1)
    pdl_launch()
    pdl_wait()
    found = 0
    for done in range(0, M, BLOCK):
        row_I = done + i_I
        live_I = tl.load(position_R + row_I, mask=row_I < M, other=-1) >= 0
        batch_slot_I = tl.load(batch_slot_R + row_I, mask=live_I, other=0)
        own_I = tl.load(adapter_Q + batch_slot_I, mask=live_I, other=-1) == slot
        own_I &= row_I < M
        one_I = own_I.to(tl.int32)
        tl.store(row_SM + s * M + found + tl.cumsum(one_I, 0) - one_I, row_I, mask=own_I)
        found += tl.sum(one_I, 0)
    tl.store(count_S + s, found)


def find_rows(rows: RowTable, adapter_Q: Tensor, found: AdapterRows) -> None:
    """Sort the rows of a step by the slot of their adapter."""
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
    row_J = tl.load(row_SM + s * M + at_J, mask=at_J < M, other=0).to(tl.int64)
    count = tl.load(count_S + s)
    if tl.program_id(0) * BM < count:
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


@triton.jit
def _low(low_PMX, scale_S, s, row_J, live_J, x_L, M, X, P: tl.constexpr):
    """Add up the segments, and scale. Loads of several segments overlap."""
    AT_ONCE: tl.constexpr = 32 if x_L.shape[0] <= 32 else 8
    low_JL = tl.zeros((row_J.shape[0], x_L.shape[0]), tl.float32)
    for first in range(0, P, AT_ONCE):
        for i in tl.static_range(min(P, AT_ONCE)):
            p = first + i
            at = low_PMX + (p * M + row_J[:, None]) * X + x_L[None, :]
            low_JL += tl.load(at, mask=live_J[:, None] & (p < P), other=0.0)
    return low_JL * tl.load(scale_S + s)


@triton.jit(do_not_specialize=["M"])
def _expand(
    low_PMX, b_SNr, scale_S, row_SM, count_S, out_MN, M, N, X, FIRST1, FIRST2,
    P: tl.constexpr, r: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add one tile of the result. The parts of the fused map begin at columns 0, FIRST1, FIRST2."""
    s, first = tl.program_id(2), tl.program_id(1) * BN
    part = (first >= FIRST1).to(tl.int32) + (first >= FIRST2).to(tl.int32)
    n_I, x_L = first + tl.arange(0, BN), tl.arange(0, r)
    at_J = tl.program_id(0) * BM + tl.arange(0, BM)
    pdl_launch()
    pdl_wait()
    row_J = tl.load(row_SM + s * M + at_J, mask=at_J < M, other=0).to(tl.int64)
    count = tl.load(count_S + s)
    if tl.program_id(0) * BM < count:
        live_J = at_J < count
        b_IL = tl.load(b_SNr + (s.to(tl.int64) * N + n_I[:, None]) * r + x_L[None, :])
        out = out_MN + row_J[:, None] * N + n_I[None, :]
        sum_JI = tl.load(out, mask=live_J[:, None], other=0.0).to(tl.float32)
        low_JL = _low(low_PMX, scale_S, s, row_J, live_J, part * r + x_L, M, X, P)
        sum_JI += dot(b_IL, low_JL.to(b_IL.dtype).T, tl.zeros((BN, BM), tl.float32)).T
        tl.store(out, sum_JI.to(out_MN.dtype.element_ty), mask=live_J[:, None])


@triton.jit(do_not_specialize=["M"])
def _expand_silu(
    low_PMX, b_SNr, scale_S, row_SM, count_S, gate_up_MN, out_MI, M, inner, X,
    P: tl.constexpr, r: tl.constexpr, BM: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """Write one tile of silu(gate) * up; both include the adapter."""
    s, x_L = tl.program_id(2), tl.arange(0, r)
    i_I = tl.program_id(1) * BI + tl.arange(0, BI)
    at_J = tl.program_id(0) * BM + tl.arange(0, BM)
    pdl_launch()
    pdl_wait()
    row_J = tl.load(row_SM + s * M + at_J, mask=at_J < M, other=0).to(tl.int64)
    count = tl.load(count_S + s)
    if tl.program_id(0) * BM < count:
        live_J = at_J < count
        inside = live_J[:, None] & (i_I < inner)[None, :]
        gate = gate_up_MN + row_J[:, None] * 2 * inner + i_I[None, :]
        gate_JI = tl.load(gate, mask=inside, other=0.0)
        up_JI = tl.load(gate + inner, mask=inside, other=0.0)
        if s < tl.num_programs(2) - 1:
            b = b_SNr + (s.to(tl.int64) * 2 * inner + i_I[:, None]) * r + x_L[None, :]
            gate_b_IL = tl.load(b, mask=(i_I < inner)[:, None], other=0.0)
            up_b_IL = tl.load(b + inner * r, mask=(i_I < inner)[:, None], other=0.0)
            gate_JL = _low(low_PMX, scale_S, s, row_J, live_J, x_L, M, X, P).to(gate_b_IL.dtype)
            up_JL = _low(low_PMX, scale_S, s, row_J, live_J, r + x_L, M, X, P).to(gate_b_IL.dtype)
            gate_JI += dot(gate_b_IL, gate_JL.T, tl.zeros((BI, BM), tl.float32)).T
            up_JI += dot(up_b_IL, up_JL.T, tl.zeros((BI, BM), tl.float32)).T
        result_JI = (silu(gate_JI) * up_JI).to(out_MI.dtype.element_ty)
        tl.store(out_MI + row_J[:, None] * inner + i_I[None, :], result_JI, mask=inside)


def shrink(x_MK: Tensor, a_SXK: Tensor, rows: AdapterRows) -> Tensor:
    """Return the matmuls of rows and the A of their adapters, by segments of K: float32 [P, M, X],
    undefined for rows without an adapter. Launched without PDL, on its own stream.
    """
    (count, inputs), (slots, width, _) = x_MK.shape, a_SXK.shape
    assert rows.row_SM.shape == (slots + 1, count) and x_MK.is_contiguous()
    segment = SEGMENT if inputs < LONG else 2 * SEGMENT
    segments = triton.cdiv(inputs, segment)
    low_PMX = torch.empty(segments, count, width, dtype=torch.float32, device=x_MK.device)
    if count:
        grid = triton.cdiv(count, ROWS), segments * triton.cdiv(width, COLUMNS), slots
        _shrink[grid](
            x_MK,
            a_SXK,
            *rows,
            low_PMX,
            count,
            inputs,
            width,
            SEGMENT=segment,
            BM=ROWS,
            BX=COLUMNS,
            BK=DEPTH,
            num_warps=4,
            num_stages=STAGES,
        )
    return low_PMX


def expand(
    low_PMX: Tensor,
    b_SNr: Tensor,
    scale_S: Tensor,
    parts: tuple[int, ...],
    rows: AdapterRows,
    out_MN: Tensor,
) -> None:
    """Add the matmuls of `low_PMX` and the B of its rows' adapters to `out_MN` (the weights' dtype
    or float32). `parts`: outputs of the fused maps, in order; each has `r` rows of A.
    """
    (segments, count, width), (slots, outputs, rank) = low_PMX.shape, b_SNr.shape
    assert len(parts) <= MAX_PARTS and width == rank * len(parts) and sum(parts) == outputs
    assert out_MN.shape == (count, outputs) and out_MN.is_contiguous()
    assert rows.row_SM.shape == (slots + 1, count)
    if not count:
        return
    ends = [sum(parts[: i + 1]) for i in range(len(parts))]
    first, second = (*ends[:-1], outputs, outputs)[:2]
    tile = tile_columns(parts)
    _expand[(triton.cdiv(count, ROWS), outputs // tile, slots)](
        low_PMX,
        b_SNr,
        scale_S,
        *rows,
        out_MN,
        count,
        outputs,
        width,
        first,
        second,
        P=segments,
        r=rank,
        BM=ROWS,
        BN=tile,
        num_warps=4,
        **PDL,
    )


def expand_silu(
    low_PMX: Tensor,
    b_SNr: Tensor,
    scale_S: Tensor,
    rows: AdapterRows,
    gate_up_MN: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return silu(gate) * up of float32 rows [gate | up] with their adapters' additions, rounded
    once. A row without an adapter has the bits of `gemm.gated`.
    """
    (segments, count, width), (slots, outputs, rank) = low_PMX.shape, b_SNr.shape
    inputs = outputs // 2
    assert gate_up_MN.dtype == torch.float32 and gate_up_MN.is_contiguous()
    assert gate_up_MN.shape == (count, outputs) and width == 2 * rank
    assert rows.row_SM.shape == (slots + 1, count)
    out_MI = torch.empty(count, inputs, dtype=dtype, device=gate_up_MN.device)
    if count:
        _expand_silu[(triton.cdiv(count, ROWS), triton.cdiv(inputs, 128), slots + 1)](
            low_PMX,
            b_SNr,
            scale_S,
            *rows,
            gate_up_MN,
            out_MI,
            count,
            inputs,
            width,
            P=segments,
            r=rank,
            BM=ROWS,
            BI=128,
            num_warps=4,
            **PDL,
        )
    return out_MI
