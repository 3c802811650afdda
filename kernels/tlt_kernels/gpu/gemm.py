"""Matrix products with a fixed order of addition: the bits of a row depend on that row and on the weights alone.

For each output element k ascends in tensor-core steps within a segment of K, and segments are added in order. Which rows are
computed beside it, how they are tiled and how deep the copies run ahead changes nothing: tensor cores add in the same order
whatever the tile. The models call `linear`, `partials` and `gated`; `gemm_tiles.py` chooses tiles by the number of rows.

Legend: M rows, N outputs, K inputs, I intermediate, X = 2I, P partial sums. Weights are [N, K] as in checkpoints.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tlt_kernels.gpu.gemm_tiles import SEGMENT_UNIT, Kind, Tile, tile_for
from tlt_kernels.gpu.target import INTERPRETED, PDL, dot, pdl_launch, pdl_wait


@triton.jit
def _prefetch(weight_NK, row, last_row, k, K, ROWS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """Ask L2 for CHUNKS * CHUNK elements of ROWS weight rows, one bulk request per thread; never past the end of a row."""
    if not INTERPRETED:
        size: tl.constexpr = weight_NK.dtype.element_ty.primitive_bitwidth // 8
        rows = tl.minimum(row + tl.arange(0, ROWS), last_row)
        offset = tl.minimum(k + tl.arange(0, CHUNKS) * CHUNK, tl.maximum(K - CHUNK, 0))
        span = tl.full((ROWS, CHUNKS), 0, tl.int32) + tl.minimum(CHUNK, K) * size
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; // $0", "=r,l,r",
            [weight_NK + rows[:, None].to(tl.int64) * K + offset[None, :], span], dtype=tl.int32, is_pure=False, pack=1,
        )


@triton.jit
def _multiply(x, weight, acc, SWAP: tl.constexpr):
    if SWAP:
        acc = dot(weight, x.T, acc)
    else:
        acc = dot(x, weight.T, acc)
    return acc


@triton.jit
def _segment_sum(x, weight, m, n, first, last, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr):
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    for k in range(first, last, BK):
        acc = _multiply(x.load([m, k]), weight.load([n, k]), acc, SWAP)
    return acc


@triton.jit(do_not_specialize=["M"])
def _gemm(x, weight, weight_NK, bias_N, out_PMN, M, N, K, segment, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
          SWAP: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, GROUP: tl.constexpr,
          CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """One tile of one segment, or of all segments added in order (ADDED). N counts outputs: a gated weight has 2N rows."""
    pdl_launch()
    rows_of_tiles, tiles_per_row = tl.cdiv(M, BM), tl.cdiv(N, BN)
    program = tl.program_id(0)
    s = program // (rows_of_tiles * tiles_per_row)
    place = program % (rows_of_tiles * tiles_per_row)
    start = place // (GROUP * tiles_per_row) * GROUP
    height = tl.minimum(rows_of_tiles - start, GROUP)
    within = place % (GROUP * tiles_per_row)
    m, n = (start + within % height) * BM, within // height * BN
    first = s * segment
    if CHUNKS > 0:
        _prefetch(weight_NK, n, N - 1, first, K, BN, CHUNKS, CHUNK)
        if GATED:
            _prefetch(weight_NK, n + N, 2 * N - 1, first, K, BN, CHUNKS, CHUNK)
    pdl_wait()
    if GATED:
        gate = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
        up = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
        for k in range(0, K, BK):
            rows = x.load([m, k])
            gate = _multiply(rows, weight.load([n, k]), gate, SWAP)
            up = _multiply(rows, weight.load([n + N, k]), up, SWAP)
        total = gate / (1.0 + tl.exp(-gate)) * up
    else:
        total = _segment_sum(x, weight, m, n, first, tl.minimum(first + segment, K), BM, BN, BK, SWAP)
        if ADDED:
            for later in range(segment, K, segment):
                total += _segment_sum(x, weight, m, n, later, tl.minimum(later + segment, K), BM, BN, BK, SWAP)
    if SWAP:
        total = total.T
    column = n + tl.arange(0, BN)
    if BIASED:
        total += tl.load(bias_N + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    row = m + tl.arange(0, BM)
    target = out_PMN + (s.to(tl.int64) * M + row[:, None]) * N + column[None, :]
    tl.store(target, total.to(out_PMN.dtype.element_ty), mask=(row < M)[:, None] & (column < N)[None, :])


def _run(tile: Tile, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_PMN: Tensor, *, segment: int, gated: bool = False,
         added: bool = False) -> None:
    (m, k), n = x_MK.shape, out_PMN.shape[-1]
    if m == 0:
        return
    parts = out_PMN.numel() // (m * n)
    chunks = max(1, tile.warps * 32 // tile.columns) if tile.ahead else 0
    _gemm[(triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns) * parts,)](
        TensorDescriptor.from_tensor(x_MK, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight_NK, [tile.columns, tile.depth]),
        weight_NK, bias_N, out_PMN, m, n, k, segment, tile.rows, tile.columns, tile.depth, tile.swap, gated, bias_N is not None, added,
        tile.group, chunks, tile.ahead // max(1, chunks), num_warps=tile.warps, num_stages=tile.stages, **PDL,
    )


def linear(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """x @ weight^T + bias, rounded once to `out_dtype` (x's by default; float32 for the LM head)."""
    out_MN = torch.empty(len(x_MK), len(weight_NK), dtype=out_dtype or x_MK.dtype, device=x_MK.device)
    _run(tile_for(Kind.LINEAR, len(x_MK), x_MK.dtype), x_MK, weight_NK, bias_N, out_MN, segment=x_MK.shape[1])
    return out_MN


def partials(x_MK: Tensor, weight_NK: Tensor, *, segments: int) -> Tensor:
    """x @ weight^T as float32 sums over segments of K, [P, M, N]: P = `segments`, or 1 where they are already added in order."""
    tile = tile_for(Kind.PARTIALS, len(x_MK), x_MK.dtype)
    units = triton.cdiv(x_MK.shape[1], SEGMENT_UNIT)
    segment = triton.cdiv(units, segments) * SEGMENT_UNIT
    parts = triton.cdiv(x_MK.shape[1], segment)
    added = tile.added and parts > 1
    out_PMN = torch.empty(1 if added else parts, len(x_MK), len(weight_NK), dtype=torch.float32, device=x_MK.device)
    _run(tile, x_MK, weight_NK, None, out_PMN, segment=segment, added=added)
    return out_PMN


def gated(x_MK: Tensor, weight_XK: Tensor) -> Tensor:
    """silu(gate) * up, computed in float32 and rounded once; the weight's first I rows are the gate's, the rest up's."""
    out_MI = torch.empty(len(x_MK), len(weight_XK) // 2, dtype=x_MK.dtype, device=x_MK.device)
    _run(tile_for(Kind.GATED, len(x_MK), x_MK.dtype), x_MK, weight_XK, None, out_MI, segment=x_MK.shape[1], gated=True)
    return out_MI
