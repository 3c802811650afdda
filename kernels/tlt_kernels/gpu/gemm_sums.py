"""The sums of the streaming matmul: its multiplying warps take tiles from the ring of shared memory
and hand them back.

A leaf of K is one ascending sum; the leaves of a part are added as a binary tree, in registers.
`gemm_stream.py` calls this file and has the legend.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tlt_kernels.gpu.gemm_copy import PANEL

_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # Triton 3.7 renamed it


@gluon.jit
def _release(free, stage, STAGES: gl.constexpr, pred):
    """Free the stage before `stage`. Without the barrier a warp could still be waiting for the
    phase that this one ends.
    """
    _barrier()
    mbarrier.arrive(free.index(gl.where(stage == 0, STAGES - 1, stage - 1)), count=1, pred=pred)


@gluon.jit
def add_leaves(
    x_buffer,
    w_buffer,
    ready,
    free,
    steps,
    stage,
    phase,
    BM: gl.constexpr,
    BN: gl.constexpr,
    PANELS: gl.constexpr,
    STAGES: gl.constexpr,
    FOLD: gl.constexpr,
    GATED: gl.constexpr,
    SUMS: gl.constexpr,
):
    """Return the sum of the next FOLD leaves, [BN, BM]: each half's sum, then both added."""
    if FOLD == 1:
        acc = gl.zeros([BN, BM], gl.float32, SUMS)
        for t in range(steps):
            mbarrier.wait(ready.index(stage), phase)
            for p in gl.static_range(PANELS):
                weights = w_buffer.index(stage * PANELS + p)
                if GATED:
                    weights = weights.reshape([BN, PANEL])
                acc = warpgroup_mma(
                    weights,
                    x_buffer.index(stage * PANELS + p).slice(0, BM).permute((1, 0)),
                    acc,
                    is_async=True,
                )
            acc = warpgroup_mma_wait(PANELS, deps=[acc])  # all steps but this one
            _release(free, stage, STAGES, t > 0)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        _release(free, stage, STAGES, True)
    else:
        half, stage, phase = add_leaves(
            x_buffer, w_buffer, ready, free, steps, stage, phase,
            BM, BN, PANELS, STAGES, FOLD // 2, GATED, SUMS,
        )  # fmt: skip
        acc, stage, phase = add_leaves(
            x_buffer, w_buffer, ready, free, steps, stage, phase,
            BM, BN, PANELS, STAGES, FOLD // 2, GATED, SUMS,
        )  # fmt: skip
        acc = half + acc
    return acc, stage, phase
