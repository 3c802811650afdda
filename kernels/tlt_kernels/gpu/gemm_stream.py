"""The bfloat16 matmul on Hopper: one warp streams tiles into a ring of shared memory, and four or
eight warps multiply.

A program stays on its multiprocessor and takes tile after tile, so the ring never drains between
tiles. The copying warp is in `gemm_copy.py`, the sums are in `gemm_sums.py`. The weight is the
first operand of the tensor cores and is read where it lies, so that few rows of x waste nothing.
Gate and up lie interleaved there, eight rows of each, so that one thread gets both. `gemm.py` calls
this file and states the rule about the order of addition.

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
from tlt_kernels.gpu.gemm_sums import add_leaves
from tlt_kernels.gpu.gemm_tiles import Tile, split_last_round
from tlt_kernels.gpu.quantise import Matrix
from tlt_kernels.gpu.silu import silu
from tlt_kernels.gpu.target import PDL


@gluon.constexpr_function
def _stored(width, bits, warps):
    """Return the layout of a tile [width, BM] in threads that store 16 bytes each. As many lanes as
    fit lie along N: with fewer, the exchange takes more shared memory.
    """
    run = 128 // bits
    lanes = min(width // run, 32)
    return gl.BlockedLayout([run, 1], [lanes, 32 // lanes], [1, warps], [0, 1])


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
    stored: gl.constexpr = _stored(WIDTH, out_PMN.dtype.element_ty.primitive_bitwidth, WARPS)
    acc, stage, phase = add_leaves(
        x_buffer, w_buffer, ready, free, steps, stage, phase,
        BM, BN, PANELS, STAGES, FOLD, GATED, sums,
    )  # fmt: skip
    if (
        GATED
    ):  # eight rows of gate, then the eight rows of up that belong to them: both in one thread
        gate, up = acc.reshape([BN // 16, 2, 8, BM]).permute([0, 2, 3, 1]).split()
        total_NM = (silu(gate) * up).reshape([WIDTH, BM])
    else:
        total_NM = acc
    if BIASED:
        column = n + gl.arange(0, WIDTH, gl.SliceLayout(1, sums))
        total_NM += gl.load(bias_N + column, mask=column < N, other=0.0).to(gl.float32)[:, None]
    total_NM = gl.convert_layout(total_NM.to(out_PMN.dtype.element_ty), stored)
    row, column = (
        gl.arange(0, BM, gl.SliceLayout(0, stored)),
        gl.arange(0, WIDTH, gl.SliceLayout(1, stored)),
    )
    corner = out_PMN + ((s.to(gl.int64) * M + m) * N + n)  # 64 bits once; from here 32 do
    gl.store(
        (corner + row * N)[None, :] + column[:, None],
        total_NM,
        mask=(row < M - m)[None, :] & (column < N - n)[:, None],
    )
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
    weight,
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
    PANELS: gl.constexpr,
    STAGES: gl.constexpr,
    FOLD: gl.constexpr,
    GATED: gl.constexpr,
    BIASED: gl.constexpr,
    GROUP: gl.constexpr,
    WARPS: gl.constexpr,
):
    gdc_launch_dependents()
    WIDTH: gl.constexpr = BN // 2 if GATED else BN  # outputs of a tile
    if GATED:
        w_buffer = gl.allocate_shared_memory(
            weight.dtype, [STAGES * PANELS, BN // 16, 2, 8, PANEL], weight.layout
        )
    else:
        w_buffer = gl.allocate_shared_memory(
            weight.dtype, [STAGES * PANELS, BN, PANEL], weight.layout
        )
    x_buffer = gl.allocate_shared_memory(x.dtype, [STAGES * PANELS, BM, PANEL], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
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
                    BM,
                    PIECE,
                    BN,
                    WIDTH,
                    PANELS,
                    STAGES,
                    FOLD,
                    GATED,
                    BIASED,
                    GROUP,
                    WARPS,
                ),
            ),
            (
                copy,
                (
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
                    BM,
                    PIECE,
                    BN,
                    WIDTH,
                    PANELS,
                    STAGES,
                    GATED,
                    GROUP,
                ),
            ),
        ],
        [1],
        [40],
    )


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def multiply(
    tile: Tile,
    x_MK: Tensor,
    weight: Matrix,
    bias_N: Tensor | None,
    out_PMN: Tensor,
    leaf: int,
    fold: int,
    gated: bool,
) -> None:
    (m, k), n = x_MK.shape, out_PMN.shape[-1]
    width = tile.columns // 2 if gated else tile.columns
    m_tiles, n_tiles = triton.cdiv(m, tile.rows), triton.cdiv(n, width)
    programs = multiprocessors(x_MK.device)
    items, whole = split_last_round(
        m_tiles * n_tiles * (out_PMN.numel() // (m * n)), programs, tile.pieces
    )
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    x, x_piece = (
        TensorDescriptor.from_tensor(x_MK, [rows, PANEL.value], layout)
        for rows in (tile.rows, tile.piece)
    )
    if gated:
        w = TensorDescriptor(
            weight.values,
            [n // 8, 2, 8, k],
            [8 * k, n * k, k, 1],
            [width // 8, 2, 8, PANEL.value],
            gl.NVMMASharedLayout(128, 16, rank=4),
        )
    else:
        w = TensorDescriptor.from_tensor(weight.values, [width, PANEL.value], layout)
    _stream[(min(items, programs),)](
        x,
        x_piece,
        w,
        bias_N,
        out_PMN,
        m,
        n,
        items,
        whole,
        m_tiles,
        n_tiles,
        leaf * fold,
        tile.rows,
        tile.piece,
        tile.columns,
        tile.depth // PANEL.value,
        tile.stages,
        fold,
        gated,
        bias_N is not None,
        tile.group,
        tile.warps,
        num_warps=tile.warps,
        # With few accumulators, leave registers to the small kernels that start during this one.
        maxnreg=128 if tile.rows * tile.columns <= tile.warps * 32 * 64 else None,
        **PDL,
    )
