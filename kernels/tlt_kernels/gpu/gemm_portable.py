"""The matmul for every GPU and dtype that Triton knows, and for its CPU interpreter. Its bits are
those of `gemm_stream.py`.

There is one program per tile and part of K, and the compiler pipelines the copies. `gemm.py` calls
it and states the rule about the order of addition.

Legend: M rows, N outputs, K inputs, P partial sums; BM, BN, BK tile of rows of x, rows of the
weight, and K; G = K / 128, B blocks of 128 outputs, W rows of x that have room for scales.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tlt_kernels.gpu.gemm_tiles import Tile
from tlt_kernels.gpu.quantise import Matrix, Quantised
from tlt_kernels.gpu.silu import silu
from tlt_kernels.gpu.target import PDL, dot, pdl_launch, pdl_wait


@triton.jit
def _add(x, scales_GW, weight, scales_BG, total_NM, m, n, k, K, W, BM: tl.constexpr):
    """Return the sum so far and the products at k. With scales these are a sum of their own."""
    if scales_GW is None:
        total_NM = dot(weight.load([n, k]), x.load([m, k]).T, total_NM)
    else:
        row, g = m + tl.arange(0, BM), k // 128
        scale_M = tl.load(scales_GW + g * W + row, mask=row < W, other=0.0)
        scale_M *= tl.load(scales_BG + n // 128 * (K // 128) + g)
        zeros_NM = tl.zeros(total_NM.shape, tl.float32)
        found_NM = dot(weight.load([n, k]), x.load([m, k]).T, zeros_NM)
        total_NM = tl.fma(found_NM, tl.broadcast_to(scale_M[None, :], total_NM.shape), total_NM)
    return total_NM


@triton.jit
def _add_leaves(
    x,
    scales_GW,
    weight,
    scales_BG,
    m,
    n,
    first,
    leaf,
    K,
    W,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    FOLD: tl.constexpr,
):
    """Return the sum of FOLD leaves from `first` on, [BN, BM]: each half's sum, then both added."""
    if FOLD == 1:
        total_NM = tl.zeros((BN, BM), tl.float32)
        for k in range(first, tl.minimum(first + leaf, K), BK):
            total_NM = _add(x, scales_GW, weight, scales_BG, total_NM, m, n, k, K, W, BM)
    else:
        total_NM = _add_leaves(
            x, scales_GW, weight, scales_BG, m, n, first, leaf, K, W, BM, BN, BK, FOLD // 2
        )
        first += FOLD // 2 * leaf
        total_NM += _add_leaves(
            x, scales_GW, weight, scales_BG, m, n, first, leaf, K, W, BM, BN, BK, FOLD // 2
        )
    return total_NM


@triton.jit(do_not_specialize=["M"])
def _multiply(
    x,
    scales_GW,
    weight,
    scales_BG,
    bias_N,
    out_PMN,
    M,
    N,
    K,
    W,
    leaf,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    FOLD: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Multiply one tile. N counts outputs, so a gated weight has 2N rows. The weight is the first
    operand of each dot, so sums lie [BN, BM].
    """
    m_tiles, n_tiles, s = tl.cdiv(M, BM), tl.cdiv(N, BN), tl.program_id(1)
    start = (
        tl.program_id(0) // (GROUP * n_tiles) * GROUP
    )  # GROUP tiles along M run side by side on the same weights
    height = tl.minimum(m_tiles - start, GROUP)
    within = tl.program_id(0) % (GROUP * n_tiles)
    m, n = (start + within % height) * BM, within // height * BN
    pdl_wait()
    if GATED:
        total_NM = tl.zeros((BN, BM), tl.float32)
        up_NM = tl.zeros((BN, BM), tl.float32)
        for k in range(0, K, BK):
            total_NM = _add(x, scales_GW, weight, scales_BG, total_NM, m, n, k, K, W, BM)
            up_NM = _add(x, scales_GW, weight, scales_BG, up_NM, m, n + N, k, K, W, BM)
        total_NM = silu(total_NM) * up_NM
    else:
        total_NM = _add_leaves(
            x, scales_GW, weight, scales_BG, m, n, s * FOLD * leaf, leaf, K, W, BM, BN, BK, FOLD
        )
    # Not before: programs of the next kernel would crowd on the multiprocessors that finish first.
    pdl_launch()
    row, column = m + tl.arange(0, BM), n + tl.arange(0, BN)
    total = total_NM.T
    if BIASED:
        total += tl.load(bias_N + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    target = out_PMN + (s.to(tl.int64) * M + row[:, None]) * N + column[None, :]
    tl.store(
        target, total.to(out_PMN.dtype.element_ty), mask=(row < M)[:, None] & (column < N)[None, :]
    )


def multiply(
    tile: Tile,
    x: Tensor | Quantised,
    weight: Matrix,
    bias_N: Tensor | None,
    out_PMN: Tensor,
    leaf: int,
    fold: int,
    gated: bool,
) -> None:
    x_MK, scales_GW = x if isinstance(x, Quantised) else (x, None)
    (m, k), n = x_MK.shape, out_PMN.shape[-1]
    _multiply[
        (triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns), out_PMN.numel() // (m * n))
    ](
        TensorDescriptor.from_tensor(x_MK, [tile.rows, tile.depth]),
        scales_GW,
        TensorDescriptor.from_tensor(weight.values, [tile.columns, tile.depth]),
        weight.scales,
        bias_N,
        out_PMN,
        m,
        n,
        k,
        0 if scales_GW is None else scales_GW.shape[1],
        leaf,
        tile.rows,
        tile.columns,
        tile.depth,
        fold,
        gated,
        bias_N is not None,
        tile.group,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **PDL,
    )
