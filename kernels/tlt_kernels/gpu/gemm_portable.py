"""The matmul for every GPU and dtype that Triton knows, and for its CPU interpreter. Its bits are
those of `gemm_stream.py`.

There is one program per tile and part of K, and the compiler pipelines the copies. `gemm.py` calls
it and states the rule about the order of addition.

Legend: M rows, N outputs, K inputs, P partial sums; BM, BN, BK tile of rows of x, rows of the
weight, and K.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tlt_kernels.gpu.gemm_tiles import Tile
from tlt_kernels.gpu.silu import silu
from tlt_kernels.gpu.target import PDL, dot, pdl_launch, pdl_wait


@triton.jit
def _add_leaves(
    x,
    weight,
    m,
    n,
    first,
    leaf,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    FOLD: tl.constexpr,
):
    """Return the sum of FOLD leaves from `first` on, [BN, BM]: each half's sum, then both added."""
    if FOLD == 1:
        total_NM = tl.zeros((BN, BM), tl.float32)
        for k in range(first, tl.minimum(first + leaf, K), BK):
            total_NM = dot(weight.load([n, k]), x.load([m, k]).T, total_NM)
    else:
        total_NM = _add_leaves(x, weight, m, n, first, leaf, K, BM, BN, BK, FOLD // 2)
        first += FOLD // 2 * leaf
        total_NM += _add_leaves(x, weight, m, n, first, leaf, K, BM, BN, BK, FOLD // 2)
    return total_NM


@triton.jit(do_not_specialize=["M"])
def _multiply(
    x,
    weight,
    bias_N,
    out_PMN,
    M,
    N,
    K,
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
            x_KM = x.load([m, k]).T
            total_NM = dot(weight.load([n, k]), x_KM, total_NM)
            up_NM = dot(weight.load([n + N, k]), x_KM, up_NM)
        total_NM = silu(total_NM) * up_NM
    else:
        total_NM = _add_leaves(x, weight, m, n, s * FOLD * leaf, leaf, K, BM, BN, BK, FOLD)
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
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    out_PMN: Tensor,
    leaf: int,
    fold: int,
    gated: bool,
) -> None:
    (m, k), n = x_MK.shape, out_PMN.shape[-1]
    _multiply[
        (triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns), out_PMN.numel() // (m * n))
    ](
        TensorDescriptor.from_tensor(x_MK, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight_NK, [tile.columns, tile.depth]),
        bias_N,
        out_PMN,
        m,
        n,
        k,
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
