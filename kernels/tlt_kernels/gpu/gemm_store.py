"""The end of a tile of the streaming matmul: SiLU, bias, rounding, and the stores.

`gemm_stream.py` and `gemm_scaled.py` call this file.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tlt_kernels.gpu.silu import silu


@gluon.constexpr_function
def _stored(width, bits, warps, x_first):
    """Return the layout of a tile [width, BM], or [BM, width] if `x_first`, in threads that store
    16 bytes each. As many lanes as fit lie along N: with fewer, the exchange takes more shared
    memory.
    """
    run = 128 // bits
    lanes = min(width // run, 32)
    sizes = [run, 1], [lanes, 32 // lanes], [1, warps]
    if x_first:
        return gl.BlockedLayout(*(each[::-1] for each in sizes), [1, 0])
    return gl.BlockedLayout(*sizes, [0, 1])


@gluon.jit
def target(
    out_PMN, M, N, m, n, s, zero, ROWS: gl.constexpr, COLUMNS: gl.constexpr, TO: gl.constexpr
):
    """Return the addresses of outputs from (m, n) on in the part s, and a mask of those that exist.
    The compiler must not know that `zero` is zero: offsets then take no registers during the sums.
    """
    row = zero * 16 + gl.arange(0, ROWS, gl.SliceLayout(1, TO))
    column = zero * 16 + gl.arange(0, COLUMNS, gl.SliceLayout(0, TO))
    corner = out_PMN + ((s.to(gl.int64) * M + m) * N + n)  # 64 bits once; from here 32 do
    mask = (row < M - m)[:, None] & (column < N - n)[None, :]
    return (corner + row * N)[:, None] + column[None, :], mask


@gluon.jit
def store(
    acc, bias_N, out_PMN, M, N, m, n, s, zero, GATED: gl.constexpr, BIASED: gl.constexpr,
    X_FIRST: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Store sums [BN, BM], or [BM, BN] if X_FIRST, as the part s of outputs from (m, n) on."""
    HEIGHT: gl.constexpr = acc.shape[0]
    LENGTH: gl.constexpr = acc.shape[1]
    N_AXIS: gl.constexpr = 0 if X_FIRST else 1  # the axis that a slice along N lacks
    # Eight rows of gate, then the eight rows of up that belong to them: both in one thread.
    if GATED:
        if X_FIRST:
            both = acc.reshape([HEIGHT, LENGTH // 16, 2, 8]).permute([0, 1, 3, 2])
            gate, up = both.split()
            total = (silu(gate) * up).reshape([HEIGHT, LENGTH // 2])
        else:
            gate, up = acc.reshape([HEIGHT // 16, 2, 8, LENGTH]).permute([0, 2, 3, 1]).split()
            total = (silu(gate) * up).reshape([HEIGHT // 2, LENGTH])
    else:
        total = acc
    WIDTH: gl.constexpr = total.shape[1 if X_FIRST else 0]
    BM: gl.constexpr = total.shape[0 if X_FIRST else 1]
    BITS: gl.constexpr = out_PMN.dtype.element_ty.primitive_bitwidth
    # Four lanes of X_FIRST sums in float32 have 32 bytes of a row, which memory takes as they are.
    stored: gl.constexpr = (
        total.type.layout if X_FIRST and BITS == 32 else _stored(WIDTH, BITS, WARPS, X_FIRST)
    )
    if BIASED:
        column = n + gl.arange(0, WIDTH, gl.SliceLayout(N_AXIS, acc.type.layout))
        bias = gl.load(bias_N + column, mask=column < N, other=0.0).to(gl.float32)
        total += bias[None, :] if X_FIRST else bias[:, None]
    total = gl.convert_layout(total.to(out_PMN.dtype.element_ty), stored)
    if X_FIRST:
        at, mask = target(out_PMN, M, N, m, n, s, zero, BM, WIDTH, stored)
    else:
        row = gl.arange(0, BM, gl.SliceLayout(0, stored))
        column = gl.arange(0, WIDTH, gl.SliceLayout(1, stored))
        corner = out_PMN + ((s.to(gl.int64) * M + m) * N + n)
        at = (corner + row * N)[None, :] + column[:, None]
        mask = (row < M - m)[None, :] & (column < N - n)[:, None]
    gl.store(at, total, mask=mask)
