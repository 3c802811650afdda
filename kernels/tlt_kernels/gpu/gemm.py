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

from tlt_kernels.gpu.gemm_tiles import HEAD_COLUMNS, SEGMENT_UNIT, Kind, Tile, tile_for
from tlt_kernels.gpu.target import PDL, dot, pdl_launch, pdl_wait


@triton.jit
def _multiply(x, weight, acc, SWAP: tl.constexpr):
    if SWAP:
        acc = dot(weight, x.T, acc)
    else:
        acc = dot(x, weight.T, acc)
    return acc


@triton.jit(do_not_specialize=["M"])
def _gemm(x, weight, bias_N, out_PMN, M, N, K, segment, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr,
          GATED: tl.constexpr, BIASED: tl.constexpr, GROUP: tl.constexpr):
    """One tile of one segment. N counts outputs: a gated weight has 2N rows."""
    rows_of_tiles, tiles_per_row = tl.cdiv(M, BM), tl.cdiv(N, BN)
    program = tl.program_id(0)
    s = program // (rows_of_tiles * tiles_per_row)
    place = program % (rows_of_tiles * tiles_per_row)
    start = place // (GROUP * tiles_per_row) * GROUP
    height = tl.minimum(rows_of_tiles - start, GROUP)
    within = place % (GROUP * tiles_per_row)
    m, n = (start + within % height) * BM, within // height * BN
    first = s * segment
    last = tl.minimum(first + segment, K)
    pdl_wait()
    total = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    if GATED:
        up = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
        for k in range(first, last, BK):
            rows = x.load([m, k])
            total = _multiply(rows, weight.load([n, k]), total, SWAP)
            up = _multiply(rows, weight.load([n + N, k]), up, SWAP)
        total = total / (1.0 + tl.exp(-total)) * up
    else:
        for k in range(first, last, BK):
            total = _multiply(x.load([m, k]), weight.load([n, k]), total, SWAP)
    pdl_launch()  # not before: programs of the next kernel would crowd on the multiprocessors that are done first
    if SWAP:
        total = total.T
    column = n + tl.arange(0, BN)
    if BIASED:
        total += tl.load(bias_N + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    row = m + tl.arange(0, BM)
    target = out_PMN + (s.to(tl.int64) * M + row[:, None]) * N + column[None, :]
    tl.store(target, total.to(out_PMN.dtype.element_ty), mask=(row < M)[:, None] & (column < N)[None, :])


def _run(tile: Tile, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_PMN: Tensor, *, segment: int, gated: bool = False) -> None:
    (m, k), n = x_MK.shape, out_PMN.shape[-1]
    if m == 0:
        return
    parts = out_PMN.numel() // (m * n)
    _gemm[(triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns) * parts,)](
        TensorDescriptor.from_tensor(x_MK, [tile.rows, tile.depth]), TensorDescriptor.from_tensor(weight_NK, [tile.columns, tile.depth]),
        bias_N, out_PMN, m, n, k, segment, tile.rows, tile.columns, tile.depth, tile.swap, gated, bias_N is not None, tile.group,
        num_warps=tile.warps, num_stages=tile.stages, **PDL,
    )


def linear(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """x @ weight^T + bias, rounded once to `out_dtype` (x's by default; float32 for the LM head)."""
    out_MN = torch.empty(len(x_MK), len(weight_NK), dtype=out_dtype or x_MK.dtype, device=x_MK.device)
    kind = Kind.HEAD if len(weight_NK) >= HEAD_COLUMNS else Kind.LINEAR
    _run(tile_for(kind, len(x_MK), x_MK.dtype), x_MK, weight_NK, bias_N, out_MN, segment=x_MK.shape[1])
    return out_MN


def partials(x_MK: Tensor, weight_NK: Tensor, *, segments: int) -> Tensor:
    """x @ weight^T as float32 sums over at most `segments` segments of K, [P, M, N]: whoever reads them adds them in order."""
    segment = triton.cdiv(triton.cdiv(x_MK.shape[1], SEGMENT_UNIT), segments) * SEGMENT_UNIT
    parts = triton.cdiv(x_MK.shape[1], segment)
    out_PMN = torch.empty(parts, len(x_MK), len(weight_NK), dtype=torch.float32, device=x_MK.device)
    _run(tile_for(Kind.PARTIALS, len(x_MK), x_MK.dtype), x_MK, weight_NK, None, out_PMN, segment=segment)
    return out_PMN


def gated(x_MK: Tensor, weight_XK: Tensor) -> Tensor:
    """silu(gate) * up, computed in float32 and rounded once; the weight's first I rows are the gate's, the rest up's."""
    out_MI = torch.empty(len(x_MK), len(weight_XK) // 2, dtype=x_MK.dtype, device=x_MK.device)
    _run(tile_for(Kind.GATED, len(x_MK), x_MK.dtype), x_MK, weight_XK, None, out_MI, segment=x_MK.shape[1], gated=True)
    return out_MI
