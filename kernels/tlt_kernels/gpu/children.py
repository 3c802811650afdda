"""Children of draft-tree nodes on the GPU, ranked by the noise that the target will sample with.

z = logits / T + G(seed, position, target id) over the draft vocabulary, T by its float32
reciprocal; a greedy row ranks by its logits. The first launch leaves the best W of every block of
the vocabulary, the second the best W of a row. Each takes W rounds of a maximum over integer keys
and of a minimum over indices, both of which are single instructions of a warp. Tied candidates stay
in the order of their indices, so the minimum is the first index of a maximum. CPU twin:
`tlt_kernels.cpu.drafting.children`.

Legend: M rows, C draft vocabulary, W children per row, B blocks of the vocabulary, Q batch slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tlt_kernels.gpu.noise import gumbel_of_tokens
from tlt_kernels.gpu.ordering import key_of, value_of
from tlt_kernels.gpu.target import PDL, pdl_launch, pdl_wait
from tlt_kernels.gpu.temperature import GREEDY_BELOW
from tlt_kernels.gpu.tensors import BatchSlots, RowTable

MAX_FEW = 32  # rows: up to here a launch is too small to fill a GPU
FEW_BLOCK, MANY_BLOCK = 128, 512  # draft tokens per program, which is a warp
MERGED = 512  # candidates that a warp merges
NOTHING = tl.constexpr(-(2**31))  # key below those of all values: no candidate


@triton.jit
def best_of(key_N, N: tl.constexpr, W: tl.constexpr, WIDE: tl.constexpr):
    """Return (keys, indices) of the W best candidates, best first, ties by index. Nothing is looked
    up before all of them are known.
    """
    at_N = tl.arange(0, N)
    ranks = tl.arange(0, WIDE)
    best_W = tl.full((WIDE,), NOTHING, tl.int32)
    at_W = tl.zeros((WIDE,), tl.int32)
    for w in tl.static_range(W):
        best = tl.max(key_N)
        at = tl.min(tl.where(key_N == best, at_N, N))
        key_N = tl.where(at_N == at, NOTHING, key_N)
        best_W = tl.where(ranks == w, best, best_W)
        at_W = tl.where(ranks == w, at, at_W)
    return best_W, at_W


@triton.jit(do_not_specialize=["B"], do_not_specialize_on_alignment=["batch_slot_M", "position_M"])
def _best_of_blocks(
    logits_MC, target_ids_C, batch_slot_M, position_M, seed_Q, temperature_Q, key_MBW, token_MBW,
    C, B, W: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pdl_launch()
    b = tl.program_id(0)
    m = tl.program_id(1).to(tl.int64)
    index = b * BLOCK + tl.arange(0, BLOCK)
    target_ids = tl.load(target_ids_C + index, mask=index < C, other=0)
    pdl_wait()
    position = tl.load(position_M + m)
    if position < 0:
        return
    z = tl.load(logits_MC + m * C + index, mask=index < C, other=-float("inf"))
    batch_slot = tl.load(batch_slot_M + m)
    temperature, seed = tl.load(temperature_Q + batch_slot), tl.load(seed_Q + batch_slot)
    if temperature >= GREEDY_BELOW:
        z = tl.fma(z, tl.div_rn(1.0, temperature), gumbel_of_tokens(seed, target_ids, position + 1))
    keys = tl.where(z > -float("inf"), key_of(z), NOTHING)
    best_W, at_W = best_of(keys, BLOCK, W, WIDE)
    ranks = tl.arange(0, WIDE)
    token_W = tl.load(target_ids_C + b * BLOCK + at_W, mask=best_W != NOTHING, other=-1)
    tl.store(key_MBW + (m * B + b) * W + ranks, best_W, mask=ranks < W)
    tl.store(token_MBW + (m * B + b) * W + ranks, token_W, mask=ranks < W)


@triton.jit(do_not_specialize_on_alignment=["position_M"])
def _best_of_rows(
    key_MBW,
    token_MBW,
    position_M,
    token_MW,
    z_MW,
    size,
    W: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    pdl_launch()
    m = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, TILE)
    pdl_wait()
    keys = tl.load(key_MBW + m * size + lanes, mask=lanes < size, other=NOTHING)
    keys = tl.where(tl.load(position_M + m) < 0, NOTHING, keys)
    best_W, at_W = best_of(keys, TILE, W, WIDE)
    ranks = tl.arange(0, WIDE)
    found = best_W != NOTHING
    token_W = tl.load(token_MBW + m * size + at_W, mask=found, other=-1)
    tl.store(token_MW + m * W + ranks, token_W, mask=ranks < W)
    tl.store(z_MW + m * W + ranks, tl.where(found, value_of(best_W), -float("inf")), mask=ranks < W)


def children(
    logits_MC: torch.Tensor,  # float32
    target_ids_C: torch.Tensor,  # int32, the target's id of every draft token
    rows: RowTable,  # a dead one has position -1; children stand one position later
    batch_slots: BatchSlots,
    *,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (token_MW int32 target ids, z_MW float32), best first, W = max(width, 2). Missing
    children are (-1, -inf).
    """
    M, C = logits_MC.shape
    batch_slot_M, position_M = rows.batch_slot_R, rows.position_R
    BLOCK = FEW_BLOCK if M <= MAX_FEW else MANY_BLOCK
    B, W = triton.cdiv(C, BLOCK), max(width, 2)
    TILE, WIDE = triton.next_power_of_2(B * W), triton.next_power_of_2(W)
    # Two allocations, both aligned: otherwise the kernel has other variants.
    key_MBW, token_MBW = (batch_slot_M.new_empty((M, B, W)) for _ in range(2))
    token_MW, z_MW = batch_slot_M.new_empty((M, W)), logits_MC.new_empty((M, W))
    _best_of_blocks[(B, M)](
        logits_MC, target_ids_C, batch_slot_M, position_M,
        batch_slots.seed_Q, batch_slots.temperature_Q, key_MBW, token_MBW, C, B,
        W=W, WIDE=WIDE, BLOCK=BLOCK, num_warps=1, **PDL,
    )  # fmt: skip
    _best_of_rows[(M,)](
        key_MBW, token_MBW, position_M, token_MW, z_MW, B * W,
        W=W, WIDE=WIDE, TILE=TILE, num_warps=min(8, max(1, TILE // MERGED)), **PDL,
    )  # fmt: skip
    return token_MW, z_MW
