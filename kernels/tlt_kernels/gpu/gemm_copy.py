"""The warp of the streaming matmul that copies: it keeps a ring of shared memory filled with tiles
of the weight and of x.

It fills the ring with weights before it waits for the kernel ahead, so memory stays busy while that
kernel ends. Only x can depend on that kernel. `gemm_stream.py` starts the warp and has the legend.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

PANEL = gl.constexpr(64)  # bfloat16 elements of K in one 128-byte row of shared memory


@gluon.jit
def locate(item, whole, m_tiles, n_tiles, GROUP: gl.constexpr, PIECES: gl.constexpr):
    """Map an item to (tile along M, piece of it, tile along N, part of K). GROUP tiles along M run
    together on the same weights.
    """
    piece = gl.where(item < whole, 0, (item - whole) % PIECES)
    unit = gl.where(item < whole, item, whole + (item - whole) // PIECES)
    s, index = unit // (m_tiles * n_tiles), unit % (m_tiles * n_tiles)
    start = index // (GROUP * n_tiles) * GROUP
    height = gl.minimum(m_tiles - start, GROUP)
    within = index % (GROUP * n_tiles)
    return start + within % height, piece, within // height, s


@gluon.jit
def _copy_weights(weight, ready, buffer, n, k, stage, PANELS: gl.constexpr, GATED: gl.constexpr):
    PANEL: gl.constexpr = buffer.shape[-1]
    for p in gl.static_range(PANELS):
        if GATED:
            tma.async_copy_global_to_shared(
                weight,
                [n // 8, 0, 0, k + p * PANEL],
                ready.index(stage),
                buffer.index(stage * PANELS + p),
            )
        else:
            tma.async_copy_global_to_shared(
                weight, [n, k + p * PANEL], ready.index(stage), buffer.index(stage * PANELS + p)
            )


@gluon.jit
def _copy_rows(x, ready, buffer, m, k, stage, BM: gl.constexpr, PANELS: gl.constexpr):
    PANEL: gl.constexpr = buffer.shape[-1]
    for p in gl.static_range(PANELS):
        tma.async_copy_global_to_shared(
            x, [m, k + p * PANEL], ready.index(stage), buffer.index(stage * PANELS + p).slice(0, BM)
        )


@gluon.jit
def _copy_row_scales(row_scales, ready, buffer, m, k, stage, W):
    """Copy one number for each row of a tile and some beyond; without scales, none."""
    if row_scales is not None:
        tma.async_copy_global_to_shared(
            row_scales, [k // 128 * W + m], ready.index(stage), buffer.index(stage)
        )


@gluon.jit
def _expect(
    barrier, whole, BM: gl.constexpr, PIECE: gl.constexpr, BN: gl.constexpr, PANELS: gl.constexpr,
    SCALES: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(barrier, (BM + BN) * PANELS * 128 + SCALES * 4, pred=whole)
    if PIECE < BM:
        mbarrier.expect(barrier, (PIECE + BN) * PANELS * 128 + SCALES * 4, pred=~whole)


@gluon.jit
def copy(
    x,
    x_piece,
    weight,
    x_buffer,
    w_buffer,
    ready,
    free,
    items,
    whole,
    m_tiles,
    n_tiles,
    part,
    BM: gl.constexpr,
    PIECE: gl.constexpr,
    BN: gl.constexpr,
    WIDTH: gl.constexpr,
    PANELS: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    GROUP: gl.constexpr,
    row_scales,
    s_buffer,
    W,
):
    BK: gl.constexpr = PANELS * x_buffer.shape[-1]
    SCALES: gl.constexpr = 0 if row_scales is None else s_buffer.shape[1]
    program, programs = gl.program_id(0), gl.num_programs(0)
    steps = gl.cdiv(part, BK)
    mt, piece, nt, s = locate(program, whole, m_tiles, n_tiles, GROUP, BM // PIECE)
    early = gl.minimum(steps, STAGES)
    for t in range(early):
        _expect(ready.index(t), program < whole, BM, PIECE, BN, PANELS, SCALES)
        _copy_weights(weight, ready, w_buffer, nt * WIDTH, s * part + t * BK, t, PANELS, GATED)
    gdc_wait()
    stage = 0
    phase = 1
    for item in range(program, items, programs):
        mt, piece, nt, s = locate(item, whole, m_tiles, n_tiles, GROUP, BM // PIECE)
        for t in range(steps):
            k = s * part + t * BK
            if (item != program) | (t >= early):
                mbarrier.wait(free.index(stage), phase)
                _expect(ready.index(stage), item < whole, BM, PIECE, BN, PANELS, SCALES)
                _copy_weights(weight, ready, w_buffer, nt * WIDTH, k, stage, PANELS, GATED)
            m = mt * BM + piece * PIECE
            _copy_row_scales(row_scales, ready, s_buffer, m, k, stage, W)
            if (PIECE == BM) | (item < whole):
                _copy_rows(x, ready, x_buffer, mt * BM, k, stage, BM, PANELS)
            else:
                _copy_rows(x_piece, ready, x_buffer, m, k, stage, PIECE, PANELS)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
