"""The multiplying warps of the streaming matmul for e4m3 operands with scales.

Each warpgroup has a share of a tile, and hands stages back by itself. So one can promote its sums
(add them to its total, multiplied by their scales) while products of the other run. A stage is 128
of K. Where registers allow, two stages are multiplied at a time, and the first is promoted during
the product of the second. Few rows of x are the second operand, so that they waste nothing. Of many
rows 64 are the first: then a thread needs only two of their scales, and may multiply two halves of
the weight's rows in turn. `gemm_stream.py` calls this file; the order of additions is that of
`gemm.py`.

Legend: as in `gemm_stream.py`; G = K / 128, B blocks of 128 rows of the weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tlt_kernels.gpu.gemm_copy import locate
from tlt_kernels.gpu.gemm_store import store, target
from tlt_kernels.gpu.gemm_sums import _barrier

HEIGHT = gl.constexpr(64)  # rows of the first operand of an instruction
_K = gl.constexpr(128)  # inputs in a stage


@dataclass(frozen=True)
class Share:
    """The share of a tile that a warpgroup multiplies, in `halves` of the weight's rows."""

    x_first: bool
    gated: bool
    x_at: int  # its first row of x in the tile
    x_rows: int
    w_at: int
    w_rows: int  # rows of a half
    halves: int

    @property
    def columns(self) -> int:
        return self.w_rows if self.x_first else self.x_rows

    @property
    def layout(self) -> gl.NVMMADistributedLayout:
        """The registers of sums [64, columns]."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.columns, 32])

    @property
    def x_layout(self) -> gl.SliceLayout:
        return gl.SliceLayout(1 if self.x_first else 0, self.layout)

    @property
    def w_layout(self) -> gl.SliceLayout:
        return gl.SliceLayout(0 if self.x_first else 1, self.layout)

    def second(self) -> Share:
        return replace(self, w_at=self.w_at + self.w_rows)

    def mangle(self) -> str:
        return "_".join(str(int(each)) for each in vars(self).values())


@gluon.constexpr_function
def share(rows, columns, warpgroups, own, x_first, gated):
    """Return the share of warpgroup `own` in a tile."""
    if x_first:
        height = HEIGHT.value
        # If rows are fewer than warpgroups, these split the weight.
        shares = rows // height
        each = columns * shares // warpgroups
        at, half = own % shares * height, min(each, 128)
        return Share(True, gated, at, height, own // shares * each, half, each // half)
    return Share(False, gated, 0, rows, own * HEIGHT.value, HEIGHT.value, 1)


@gluon.constexpr_function
def second(given):
    return given.second()


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    wraps = stage + 1 == STAGES
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _product(x_buffer, w_buffer, stage, BN: gl.constexpr, SHARE: gl.constexpr):
    """Start the product of a stage, from zero."""
    COLUMNS: gl.constexpr = SHARE.columns
    SUMS: gl.constexpr = SHARE.layout
    x = x_buffer.index(stage).slice(SHARE.x_at, SHARE.x_rows)
    weights = w_buffer.index(stage)
    if SHARE.gated:
        weights = weights.reshape([BN, _K])
    weights = weights.slice(SHARE.w_at, SHARE.w_rows)
    nothing = gl.zeros([HEIGHT, COLUMNS], gl.float32, SUMS)
    if SHARE.x_first:
        found = warpgroup_mma(x, weights.permute((1, 0)), nothing, use_acc=False, is_async=True)
    else:
        found = warpgroup_mma(weights, x.permute((1, 0)), nothing, use_acc=False, is_async=True)
    return found


@gluon.jit
def _block_scales(scale_B, other_scale_B, g, last):
    """Return the scales of two blocks at the g-th 128 of K."""
    at = gl.minimum(g, last)
    return gl.load(scale_B + at), gl.load(other_scale_B + at)


@gluon.jit
def _row_scales(s_buffer, stage, SHARE: gl.constexpr):
    ALONG_X: gl.constexpr = SHARE.x_layout
    return s_buffer.index(stage).slice(SHARE.x_at, SHARE.x_rows).load(ALONG_X)


@gluon.jit
def _factors(row, scale, up_scale, SHARE: gl.constexpr):
    """Return the products of the scales of a share's rows and blocks, in the layout of its sums."""
    ROWS: gl.constexpr = SHARE.w_rows
    ALONG_W: gl.constexpr = SHARE.w_layout
    block = gl.full([ROWS], scale, gl.float32, ALONG_W)
    if SHARE.gated:
        is_gate = gl.arange(0, ROWS, ALONG_W) // 8 % 2 == 0
        block = gl.where(is_gate, block, up_scale)
    if SHARE.x_first:
        factors = row[:, None] * block[None, :]
    else:
        factors = row[None, :] * block[:, None]
    return factors


@gluon.jit
def _free(free, stage):
    mbarrier.arrive(free.index(stage), count=1)


@gluon.jit
def _add_pairs(
    x_buffer, w_buffer, s_buffer, ready, free, scale_B, other_scale_B, g, last, steps, stage, phase,
    BN: gl.constexpr, STAGES: gl.constexpr, SHARE: gl.constexpr,
):  # fmt: skip
    """Return the sum of a leaf, [64, columns], two stages at a time."""
    COLUMNS: gl.constexpr = SHARE.columns
    SUMS: gl.constexpr = SHARE.layout
    acc = gl.zeros([HEIGHT, COLUMNS], gl.float32, SUMS)
    scale, up_scale = _block_scales(scale_B, other_scale_B, g, last)
    other, up_other = _block_scales(scale_B, other_scale_B, g + 1, last)
    for _ in range(steps // 2):
        after, after_phase = _next(stage, phase, STAGES)
        mbarrier.wait(ready.index(stage), phase)
        mbarrier.wait(ready.index(after), after_phase)
        found = _product(x_buffer, w_buffer, stage, BN, SHARE)
        found_after = _product(x_buffer, w_buffer, after, BN, SHARE)
        factors = _factors(_row_scales(s_buffer, stage, SHARE), scale, up_scale, SHARE)
        factors_after = _factors(_row_scales(s_buffer, after, SHARE), other, up_other, SHARE)
        g += 2
        scale, up_scale = _block_scales(scale_B, other_scale_B, g, last)
        other, up_other = _block_scales(scale_B, other_scale_B, g + 1, last)
        found = warpgroup_mma_wait(1, deps=[found])
        acc = gl.fma(found, factors, acc)
        found_after = warpgroup_mma_wait(0, deps=[found_after])
        _barrier()
        _free(free, stage)
        _free(free, after)
        acc = gl.fma(found_after, factors_after, acc)
        stage, phase = _next(after, after_phase, STAGES)
    if steps % 2 == 1:
        mbarrier.wait(ready.index(stage), phase)
        found = _product(x_buffer, w_buffer, stage, BN, SHARE)
        factors = _factors(_row_scales(s_buffer, stage, SHARE), scale, up_scale, SHARE)
        found = warpgroup_mma_wait(0, deps=[found])
        _barrier()
        _free(free, stage)
        acc = gl.fma(found, factors, acc)
        stage, phase = _next(stage, phase, STAGES)
    return acc, stage, phase


@gluon.jit
def _add_folded(
    x_buffer, w_buffer, s_buffer, ready, free, scale_B, other_scale_B, g, last, steps, stage, phase,
    BN: gl.constexpr, STAGES: gl.constexpr, FOLD: gl.constexpr, SHARE: gl.constexpr,
):  # fmt: skip
    """Return the sum of FOLD leaves: each half's sum, then both added."""
    if FOLD == 1:
        acc, stage, phase = _add_pairs(
            x_buffer, w_buffer, s_buffer, ready, free, scale_B, other_scale_B, g, last, steps,
            stage, phase, BN, STAGES, SHARE,
        )  # fmt: skip
    else:
        half, stage, phase = _add_folded(
            x_buffer, w_buffer, s_buffer, ready, free, scale_B, other_scale_B, g, last, steps,
            stage, phase, BN, STAGES, FOLD // 2, SHARE,
        )  # fmt: skip
        g += FOLD // 2 * steps
        acc, stage, phase = _add_folded(
            x_buffer, w_buffer, s_buffer, ready, free, scale_B, other_scale_B, g, last, steps,
            stage, phase, BN, STAGES, FOLD // 2, SHARE,
        )  # fmt: skip
        acc = half + acc
    return acc, stage, phase


@gluon.jit
def _add_halves(
    x_buffer, w_buffer, s_buffer, ready, free, scale_B, other_scale_B, g, last, steps, stage, phase,
    BN: gl.constexpr, STAGES: gl.constexpr, SHARE: gl.constexpr,
):  # fmt: skip
    """Return the sums of a leaf of both halves, which are multiplied in turn."""
    SECOND: gl.constexpr = second(SHARE)
    COLUMNS: gl.constexpr = SHARE.columns
    SUMS: gl.constexpr = SHARE.layout
    acc = gl.zeros([HEIGHT, COLUMNS], gl.float32, SUMS)
    second_acc = acc
    after, other_after = _block_scales(scale_B, other_scale_B, g, last)
    for _ in range(steps):
        scale, other = after, other_after
        g += 1
        after, other_after = _block_scales(scale_B, other_scale_B, g, last)
        mbarrier.wait(ready.index(stage), phase)
        row = _row_scales(s_buffer, stage, SHARE)
        factors = _factors(row, scale, other, SHARE)
        found = _product(x_buffer, w_buffer, stage, BN, SHARE)
        found = warpgroup_mma_wait(0, deps=[found])
        acc = gl.fma(found, factors, acc)
        found = _product(x_buffer, w_buffer, stage, BN, SECOND)
        if not SHARE.gated:
            factors = _factors(row, other, other, SECOND)
        found = warpgroup_mma_wait(0, deps=[found])
        _barrier()
        _free(free, stage)
        second_acc = gl.fma(found, factors, second_acc)
        stage, phase = _next(stage, phase, STAGES)
    return acc, second_acc, stage, phase


@gluon.jit
def _park(acc, out_PMN, M, N, m, n, s, zero):
    """Store the sum of a leaf where the sum of both will be: there are no registers for both."""
    TO: gl.constexpr = acc.type.layout
    at, mask = target(out_PMN, M, N, m, n, s, zero, acc.shape[0], acc.shape[1], TO)
    gl.store(at, acc, mask=mask)


@gluon.jit
def _add_parked(acc, out_PMN, M, N, m, n, s, zero):
    """Add what this thread parked."""
    TO: gl.constexpr = acc.type.layout
    at, mask = target(out_PMN, M, N, m, n, s, zero, acc.shape[0], acc.shape[1], TO)
    return gl.load(at, mask=mask, other=0.0) + acc


@gluon.jit
def _multiply_tile(
    x_buffer, w_buffer, s_buffer, ready, free, scales_BG, bias_N, out_PMN, M, N, G, m, n, s, steps,
    stage, phase, BM: gl.constexpr, BN: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
    FOLD: gl.constexpr, GATED: gl.constexpr, BIASED: gl.constexpr, X_FIRST: gl.constexpr,
    OWN: gl.constexpr, WARPGROUPS: gl.constexpr,
):  # fmt: skip
    SHARE: gl.constexpr = share(BM, BN, WARPGROUPS, OWN, X_FIRST, GATED)
    m += SHARE.x_at
    n += SHARE.w_at * WIDTH // BN
    g = s * FOLD * steps
    # The blocks of both halves, or of gate and up. A part of the tile may be beyond the last.
    last = ((2 * N if GATED else N) - 1) // 128
    scale_B = scales_BG + gl.minimum(n // 128, last) * G
    other_scale_B = scales_BG + gl.minimum((n + (N if GATED else 128)) // 128, last) * G
    if SHARE.halves == 1 and X_FIRST and FOLD == 2:
        acc, stage, phase = _add_pairs(
            x_buffer, w_buffer, s_buffer, ready, free, scale_B, other_scale_B, g, G - 1, steps,
            stage, phase, BN, STAGES, SHARE,
        )  # fmt: skip
        _park(acc, out_PMN, M, N, m, n, s, stage >> 30)
        acc, stage, phase = _add_pairs(
            x_buffer, w_buffer, s_buffer, ready, free, scale_B, other_scale_B, g + steps, G - 1,
            steps, stage, phase, BN, STAGES, SHARE,
        )  # fmt: skip
        acc = _add_parked(acc, out_PMN, M, N, m, n, s, stage >> 30)
        store(acc, bias_N, out_PMN, M, N, m, n, s, stage >> 30, GATED, BIASED, X_FIRST, 4)
    elif SHARE.halves == 1:
        acc, stage, phase = _add_folded(
            x_buffer, w_buffer, s_buffer, ready, free, scale_B, other_scale_B, g, G - 1, steps,
            stage, phase, BN, STAGES, FOLD, SHARE,
        )  # fmt: skip
        store(acc, bias_N, out_PMN, M, N, m, n, s, stage >> 30, GATED, BIASED, X_FIRST, 4)
    else:
        HALF: gl.constexpr = SHARE.w_rows // 2 if GATED else SHARE.w_rows  # outputs
        acc, second_acc, stage, phase = _add_halves(
            x_buffer, w_buffer, s_buffer, ready, free, scale_B, other_scale_B, g, G - 1, steps,
            stage, phase, BN, STAGES, SHARE,
        )  # fmt: skip
        store(acc, bias_N, out_PMN, M, N, m, n, s, stage >> 30, GATED, BIASED, X_FIRST, 4)
        n += HALF
        store(second_acc, bias_N, out_PMN, M, N, m, n, s, stage >> 30, GATED, BIASED, X_FIRST, 4)
    return stage, phase


@gluon.jit
def multiply_scaled(
    x_buffer, w_buffer, s_buffer, ready, free, scales_BG, bias_N, out_PMN, M, N, G,
    items, whole, m_tiles, n_tiles, part, BM: gl.constexpr, PIECE: gl.constexpr, BN: gl.constexpr,
    WIDTH: gl.constexpr, STAGES: gl.constexpr, FOLD: gl.constexpr, GATED: gl.constexpr,
    BIASED: gl.constexpr, GROUP: gl.constexpr, X_FIRST: gl.constexpr, OWN: gl.constexpr,
    WARPGROUPS: gl.constexpr,
):  # fmt: skip
    """Multiply this warpgroup's share of the program's tiles, then of its pieces of tiles."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    steps = gl.cdiv(part, FOLD * _K)
    stage = 0
    phase = 0
    for item in range(program, whole, programs):
        mt, piece, nt, s = locate(item, whole, m_tiles, n_tiles, GROUP, BM // PIECE)
        stage, phase = _multiply_tile(
            x_buffer, w_buffer, s_buffer, ready, free, scales_BG, bias_N, out_PMN, M, N, G,
            mt * BM, nt * WIDTH, s, steps, stage, phase, BM, BN, WIDTH, STAGES, FOLD, GATED,
            BIASED, X_FIRST, OWN, WARPGROUPS,
        )  # fmt: skip
    if PIECE < BM:
        first = program + gl.cdiv(gl.maximum(whole - program, 0), programs) * programs
        for item in range(first, items, programs):
            mt, piece, nt, s = locate(item, whole, m_tiles, n_tiles, GROUP, BM // PIECE)
            stage, phase = _multiply_tile(
                x_buffer, w_buffer, s_buffer, ready, free, scales_BG, bias_N, out_PMN, M, N, G,
                mt * BM + piece * PIECE, nt * WIDTH, s, steps, stage, phase, PIECE, BN, WIDTH,
                STAGES, FOLD, GATED, BIASED, X_FIRST, OWN, WARPGROUPS,
            )  # fmt: skip
