"""The bfloat16 matrix product on Hopper: one warp streams tiles into a ring of shared memory, four or eight multiply.

A program stays on its multiprocessor and takes tile after tile, so the ring never drains between tiles; and it fills the ring with
weights before it waits for the kernel ahead, so memory stays busy while that one ends. The weight is the tensor cores' first
operand, read where it lies: few rows of x waste nothing. Called by `gemm.py`, which has the rule about the order of addition.

Legend: M rows, N outputs, K inputs, P segments of K; BM, BN, BK tile of rows of x, rows of the weight, and K.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tlt_kernels.gpu.gemm_tiles import Tile
from tlt_kernels.gpu.target import PDL

PANEL = gl.constexpr(64)  # elements of K in one 128-byte row of shared memory
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # Triton 3.7 renamed it


@gluon.jit
def _place(unit, m_tiles, n_tiles, GROUP: gl.constexpr):
    """Unit -> tile along M, tile along N, segment. GROUP tiles along M run side by side on the same weights."""
    s, place = unit // (m_tiles * n_tiles), unit % (m_tiles * n_tiles)
    start = place // (GROUP * n_tiles) * GROUP
    height = gl.minimum(m_tiles - start, GROUP)
    within = place % (GROUP * n_tiles)
    return start + within % height, within // height, s


@gluon.jit
def _copy_weights(weight, ready, buffer, n, N, k, stage, WIDTH: gl.constexpr, PANELS: gl.constexpr, GATED: gl.constexpr):
    for p in gl.static_range(PANELS):
        target = buffer.index(stage * PANELS + p)
        if GATED:
            tma.async_copy_global_to_shared(weight, [n, k + p * PANEL], ready.index(stage), target.slice(0, WIDTH))
            tma.async_copy_global_to_shared(weight, [n + N, k + p * PANEL], ready.index(stage), target.slice(WIDTH, WIDTH))
        else:
            tma.async_copy_global_to_shared(weight, [n, k + p * PANEL], ready.index(stage), target)


@gluon.jit
def _copy_rows(x, ready, buffer, m, k, stage, PANELS: gl.constexpr):
    for p in gl.static_range(PANELS):
        tma.async_copy_global_to_shared(x, [m, k + p * PANEL], ready.index(stage), buffer.index(stage * PANELS + p))


@gluon.jit
def _copy(x, weight, x_buffer, w_buffer, ready, free, N, units, m_tiles, n_tiles, segment, BM: gl.constexpr, BN: gl.constexpr,
          WIDTH: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, GROUP: gl.constexpr):
    BK: gl.constexpr = PANELS * PANEL
    BYTES: gl.constexpr = (BM + BN) * BK * 2
    program, programs = gl.program_id(0), gl.num_programs(0)
    steps = gl.cdiv(segment, BK)
    mt, nt, s = _place(program, m_tiles, n_tiles, GROUP)
    early = gl.minimum(steps, STAGES)
    for t in range(early):
        mbarrier.expect(ready.index(t), BYTES)
        _copy_weights(weight, ready, w_buffer, nt * WIDTH, N, s * segment + t * BK, t, WIDTH, PANELS, GATED)
    gdc_wait()
    for t in range(early):
        _copy_rows(x, ready, x_buffer, mt * BM, s * segment + t * BK, t, PANELS)
    stage = early % STAGES
    phase = 1 - early // STAGES
    for unit in range(program, units, programs):
        mt, nt, s = _place(unit, m_tiles, n_tiles, GROUP)
        for t in range(gl.where(unit == program, early, 0), steps):
            mbarrier.wait(free.index(stage), phase)
            mbarrier.expect(ready.index(stage), BYTES)
            k = s * segment + t * BK
            _copy_weights(weight, ready, w_buffer, nt * WIDTH, N, k, stage, WIDTH, PANELS, GATED)
            _copy_rows(x, ready, x_buffer, mt * BM, k, stage, PANELS)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _release(free, stage, STAGES: gl.constexpr, pred):
    """Hands back the stage before `stage`. Without the barrier a warp could still be waiting for the phase that this one ends."""
    _barrier()
    mbarrier.arrive(free.index(gl.where(stage == 0, STAGES - 1, stage - 1)), count=1, pred=pred)


@gluon.jit
def _multiply(x_buffer, w_buffer, ready, free, bias_N, out_PMN, M, N, units, m_tiles, n_tiles, segment, BM: gl.constexpr,
              BN: gl.constexpr, WIDTH: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
              BIASED: gl.constexpr, GROUP: gl.constexpr, WARPS: gl.constexpr):
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BM, 16])
    pairs: gl.constexpr = gl.BlockedLayout([1, 1, 2], [32, 1, 1], [1, WARPS, 1], [2, 0, 1])
    flat: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, WARPS], [0, 1])
    steps = gl.cdiv(segment, PANELS * PANEL)
    stage = 0
    phase = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        acc = gl.zeros([BN, BM], gl.float32, sums)
        for t in range(steps):
            mbarrier.wait(ready.index(stage), phase)
            for p in gl.static_range(PANELS):
                x_KM = x_buffer.index(stage * PANELS + p).permute((1, 0))
                acc = warpgroup_mma(w_buffer.index(stage * PANELS + p), x_KM, acc, is_async=True)
            acc = warpgroup_mma_wait(PANELS, deps=[acc])  # all but this step's
            _release(free, stage, STAGES, t > 0)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        _release(free, stage, STAGES, True)
        if GATED:
            gate, up = gl.convert_layout(acc.reshape([2, WIDTH, BM]).permute([1, 2, 0]), pairs).split()
            total_NM = gate / (1.0 + gl.exp(-gate)) * up
        else:
            total_NM = acc
        total_NM = gl.convert_layout(total_NM, flat)
        mt, nt, s = _place(unit, m_tiles, n_tiles, GROUP)
        row = mt * BM + gl.arange(0, BM, gl.SliceLayout(0, flat))
        column = nt * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(1, flat))
        if BIASED:
            total_NM += gl.load(bias_N + column, mask=column < N, other=0.0).to(gl.float32)[:, None]
        target = out_PMN + (s.to(gl.int64) * M + row[None, :]) * N + column[:, None]
        gl.store(target, total_NM.to(out_PMN.dtype.element_ty), mask=(row < M)[None, :] & (column < N)[:, None])


@gluon.jit(do_not_specialize=["M", "units", "m_tiles", "n_tiles"])
def _stream(x, weight, bias_N, out_PMN, M, N, units, m_tiles, n_tiles, segment, BM: gl.constexpr, BN: gl.constexpr,
            PANELS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, BIASED: gl.constexpr, GROUP: gl.constexpr,
            WARPS: gl.constexpr):
    gdc_launch_dependents()
    WIDTH: gl.constexpr = BN // 2 if GATED else BN  # outputs of a tile
    w_buffer = gl.allocate_shared_memory(weight.dtype, [STAGES * PANELS, BN, PANEL], weight.layout)
    x_buffer = gl.allocate_shared_memory(x.dtype, [STAGES * PANELS, BM, PANEL], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize([
        (_multiply, (x_buffer, w_buffer, ready, free, bias_N, out_PMN, M, N, units, m_tiles, n_tiles, segment, BM, BN, WIDTH, PANELS,
                     STAGES, GATED, BIASED, GROUP, WARPS)),
        (_copy, (x, weight, x_buffer, w_buffer, ready, free, N, units, m_tiles, n_tiles, segment, BM, BN, WIDTH, PANELS, STAGES,
                 GATED, GROUP)),
    ], [1], [40])


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def multiply(tile: Tile, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_PMN: Tensor, segment: int, gated: bool) -> None:
    m, n = len(x_MK), out_PMN.shape[-1]
    width = tile.columns // 2 if gated else tile.columns
    m_tiles, n_tiles = triton.cdiv(m, tile.rows), triton.cdiv(n, width)
    units = m_tiles * n_tiles * (out_PMN.numel() // (m * n))
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    x = TensorDescriptor.from_tensor(x_MK, [tile.rows, PANEL.value], layout)
    weight = TensorDescriptor.from_tensor(weight_NK, [width, PANEL.value], layout)
    _stream[(min(units, _multiprocessors(x_MK.device) * tile.programs),)](
        x, weight, bias_N, out_PMN, m, n, units, m_tiles, n_tiles, segment, tile.rows, tile.columns, tile.depth // PANEL.value,
        tile.stages, gated, bias_N is not None, tile.group, tile.warps, num_warps=tile.warps,
        # few accumulators: leave registers to the small kernels that start beside this one
        maxnreg=128 if tile.rows * tile.columns <= tile.warps * 32 * 64 and tile.warps == 4 else None, **PDL,
    )
