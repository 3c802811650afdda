"""The matmul on Hopper: one warp streams tiles into a ring of shared memory, and four or eight
warps multiply.

A program stays on its multiprocessor and takes tile after tile, so the ring never drains between
tiles. The copying warp is in `gemm_copy.py`; the sums are in `gemm_sums.py`, those of e4m3 operands
in `gemm_scaled.py`. The weight is the first operand of the tensor cores and is read where it lies,
so that few rows of x waste nothing. Gate and up lie interleaved there, eight rows of each, so that
one thread gets both. `gemm.py` calls this file and states the rule about the order of addition.

Legend: M rows, N outputs, K inputs, P partial sums; BM, BN, BK tile of rows of x, rows of the
weight, and K.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents

from tlt_kernels.gpu.gemm_copy import PANEL, copy, locate
from tlt_kernels.gpu.gemm_scaled import multiply_scaled
from tlt_kernels.gpu.gemm_store import store
from tlt_kernels.gpu.gemm_sums import add_leaves
from tlt_kernels.gpu.gemm_tiles import Tile, split_last_round
from tlt_kernels.gpu.quantise import BLOCK, ROW_UNIT, Matrix, Quantised
from tlt_kernels.gpu.target import PDL


@gluon.jit
def _multiply_tile(
    x_buffer,
    w_buffer,
    ready,
    free,
    bias_N,
    out_PMN,
    M,
    N,
    m,
    n,
    s,
    steps,
    stage,
    phase,
    BM: gl.constexpr,
    BN: gl.constexpr,
    WIDTH: gl.constexpr,
    PANELS: gl.constexpr,
    STAGES: gl.constexpr,
    FOLD: gl.constexpr,
    GATED: gl.constexpr,
    BIASED: gl.constexpr,
    WARPS: gl.constexpr,
):
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BM, 16]
    )
    acc, stage, phase = add_leaves(
        x_buffer, w_buffer, ready, free, steps, stage, phase,
        BM, BN, PANELS, STAGES, FOLD, GATED, sums,
    )  # fmt: skip
    store(acc, bias_N, out_PMN, M, N, m, n, s, 0, GATED, BIASED, False, WARPS)
    return stage, phase


@gluon.jit
def _multiply(
    x_buffer,
    w_buffer,
    ready,
    free,
    bias_N,
    out_PMN,
    M,
    N,
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
    FOLD: gl.constexpr,
    GATED: gl.constexpr,
    BIASED: gl.constexpr,
    GROUP: gl.constexpr,
    WARPS: gl.constexpr,
):
    program, programs = gl.program_id(0), gl.num_programs(0)
    steps = gl.cdiv(part, FOLD * PANELS * PANEL)
    stage = 0
    phase = 0
    for item in range(program, whole, programs):
        mt, piece, nt, s = locate(item, whole, m_tiles, n_tiles, GROUP, BM // PIECE)
        stage, phase = _multiply_tile(
            x_buffer,
            w_buffer,
            ready,
            free,
            bias_N,
            out_PMN,
            M,
            N,
            mt * BM,
            nt * WIDTH,
            s,
            steps,
            stage,
            phase,
            BM,
            BN,
            WIDTH,
            PANELS,
            STAGES,
            FOLD,
            GATED,
            BIASED,
            WARPS,
        )
    if PIECE < BM:
        for item in range(
            program + gl.cdiv(gl.maximum(whole - program, 0), programs) * programs, items, programs
        ):
            mt, piece, nt, s = locate(item, whole, m_tiles, n_tiles, GROUP, BM // PIECE)
            stage, phase = _multiply_tile(
                x_buffer,
                w_buffer,
                ready,
                free,
                bias_N,
                out_PMN,
                M,
                N,
                mt * BM + piece * PIECE,
                nt * WIDTH,
                s,
                steps,
                stage,
                phase,
                PIECE,
                BN,
                WIDTH,
                PANELS,
                STAGES,
                FOLD,
                GATED,
                BIASED,
                WARPS,
            )


@gluon.jit(do_not_specialize=["M", "items", "whole", "m_tiles", "n_tiles"])
def _stream(
    x,
    x_piece,
    row_scales,
    weight,
    scales_BG,
    bias_N,
    out_PMN,
    M,
    N,
    W,
    G,
    items,
    whole,
    m_tiles,
    n_tiles,
    part,
    BM: gl.constexpr,
    PIECE: gl.constexpr,
    BN: gl.constexpr,
    PANELS: gl.constexpr,
    STAGES: gl.constexpr,
    FOLD: gl.constexpr,
    GATED: gl.constexpr,
    BIASED: gl.constexpr,
    GROUP: gl.constexpr,
    WARPS: gl.constexpr,
    X_FIRST: gl.constexpr,
):
    gdc_launch_dependents()
    WIDTH: gl.constexpr = BN // 2 if GATED else BN  # outputs of a tile
    LENGTH: gl.constexpr = x.block_shape[1]
    if GATED:
        w_buffer = gl.allocate_shared_memory(
            weight.dtype, [STAGES * PANELS, BN // 16, 2, 8, LENGTH], weight.layout
        )
    else:
        w_buffer = gl.allocate_shared_memory(
            weight.dtype, [STAGES * PANELS, BN, LENGTH], weight.layout
        )
    x_buffer = gl.allocate_shared_memory(x.dtype, [STAGES * PANELS, BM, LENGTH], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1 if row_scales is None else WARPS // 4)
    fence_async_shared()
    if row_scales is None:
        gl.warp_specialize(
            [
                (_multiply, (
                    x_buffer, w_buffer, ready, free, bias_N, out_PMN, M, N, items, whole, m_tiles,
                    n_tiles, part, BM, PIECE, BN, WIDTH, PANELS, STAGES, FOLD, GATED, BIASED, GROUP,
                    WARPS,
                )),
                (copy, (
                    x, x_piece, weight, x_buffer, w_buffer, ready, free, items, whole, m_tiles,
                    n_tiles, part, BM, PIECE, BN, WIDTH, PANELS, STAGES, GATED, GROUP, None,
                    None, 0,
                )),
            ],
            [1],
            [40],
        )  # fmt: skip
    else:
        s_buffer = gl.allocate_shared_memory(
            gl.float32, [STAGES, row_scales.block_shape[0]], row_scales.layout
        )
        if WARPS == 4:
            gl.warp_specialize(
                [
                    (multiply_scaled, (
                        x_buffer, w_buffer, s_buffer, ready, free, scales_BG, bias_N, out_PMN, M, N,
                        G, items, whole, m_tiles, n_tiles, part, BM, PIECE, BN, WIDTH, STAGES, FOLD,
                        GATED, BIASED, GROUP, X_FIRST, 0, 1,
                    )),
                    (copy, (
                        x, x_piece, weight, x_buffer, w_buffer, ready, free, items, whole, m_tiles,
                        n_tiles, part, BM, PIECE, BN, WIDTH, PANELS, STAGES, GATED, GROUP,
                        row_scales, s_buffer, W,
                    )),
                ],
                [1],
                [40],
            )  # fmt: skip
        else:
            gl.warp_specialize(
                [
                    (multiply_scaled, (
                        x_buffer, w_buffer, s_buffer, ready, free, scales_BG, bias_N, out_PMN, M, N,
                        G, items, whole, m_tiles, n_tiles, part, BM, PIECE, BN, WIDTH, STAGES, FOLD,
                        GATED, BIASED, GROUP, X_FIRST, 0, 2,
                    )),
                    (multiply_scaled, (
                        x_buffer, w_buffer, s_buffer, ready, free, scales_BG, bias_N, out_PMN, M, N,
                        G, items, whole, m_tiles, n_tiles, part, BM, PIECE, BN, WIDTH, STAGES, FOLD,
                        GATED, BIASED, GROUP, X_FIRST, 1, 2,
                    )),
                    (copy, (
                        x, x_piece, weight, x_buffer, w_buffer, ready, free, items, whole, m_tiles,
                        n_tiles, part, BM, PIECE, BN, WIDTH, PANELS, STAGES, GATED, GROUP,
                        row_scales, s_buffer, W,
                    )),
                ],
                [4, 1],
                [240, 24],
            )  # fmt: skip


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


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
    width = tile.columns // 2 if gated else tile.columns
    m_tiles, n_tiles = triton.cdiv(m, tile.rows), triton.cdiv(n, width)
    programs = multiprocessors(x_MK.device)
    items, whole = split_last_round(
        m_tiles * n_tiles * (out_PMN.numel() // (m * n)), programs, tile.pieces
    )
    panel, bits = 128 // x_MK.itemsize, 8 * x_MK.itemsize
    layout = gl.NVMMASharedLayout(128, bits, rank=2)
    x_tile, x_piece = (
        TensorDescriptor.from_tensor(x_MK, [rows, panel], layout)
        for rows in (tile.rows, tile.piece)
    )
    if gated:
        w_tile = TensorDescriptor(
            weight.values,
            [n // 8, 2, 8, k],
            [8 * k, n * k, k, 1],
            [width // 8, 2, 8, panel],
            gl.NVMMASharedLayout(128, bits, rank=4),
        )
    else:
        w_tile = TensorDescriptor.from_tensor(weight.values, [width, panel], layout)
    row_scales = None
    if scales_GW is not None:
        row_scales = TensorDescriptor.from_tensor(
            scales_GW.view(-1), [max(tile.rows, ROW_UNIT)], gl.NVMMASharedLayout(0, 32, rank=1)
        )
    few = tile.rows * tile.columns <= tile.warps * 32 * 64
    if scales_GW is not None:
        few = tile.warps == 4
    _stream[(min(items, programs),)](
        x_tile,
        x_piece,
        row_scales,
        w_tile,
        weight.scales,
        bias_N,
        out_PMN,
        m,
        n,
        0 if scales_GW is None else scales_GW.shape[1],
        triton.cdiv(k, BLOCK),
        items,
        whole,
        m_tiles,
        n_tiles,
        leaf * fold,
        tile.rows,
        tile.piece,
        tile.columns,
        tile.depth // panel,
        tile.stages,
        fold,
        gated,
        bias_N is not None,
        tile.group,
        tile.warps,
        tile.x_first,
        num_warps=tile.warps if scales_GW is None else 4,
        # With few accumulators, leave registers to the small kernels that start during this one.
        maxnreg=128 if few else None,
        **PDL,
    )
