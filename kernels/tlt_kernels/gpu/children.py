"""Children of draft-tree nodes on the GPU, ranked by the noise that the target will sample with.

z = logits / T + G(seed, position, target id) over the draft vocabulary, T by its float32 reciprocal; a greedy row ranks by its logits.
The first launch leaves the best W of every block of the vocabulary, the second the best W of a row. A candidate travels as one
int64, the order of its z above the complement of its index, so that a plain maximum breaks ties to the earlier index.
CPU twin: `tlt_kernels.cpu.drafting.children`.

Legend: M rows, C draft vocabulary, W children per row, B blocks of the vocabulary, Q places.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tlt_kernels.gpu.noise import gumbel_of_tokens
from tlt_kernels.gpu.ordering import key_of, value_of
from tlt_kernels.gpu.target import PDL, pdl_launch, pdl_wait
from tlt_kernels.gpu.temperature import GREEDY_BELOW

BLOCK = 256  # draft tokens of one program
BLOCK_WARPS = 1
MERGE_WARPS = 4
NOTHING = tl.constexpr(-(2**63))  # below every candidate
COMPLEMENT = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _packed(z, index):
    """Candidates that order by falling z, ties by rising index; -inf and NaN are none."""
    return tl.where(z > -float("inf"), (key_of(z).to(tl.int64) << 32) | (index ^ COMPLEMENT).to(tl.int64), NOTHING)


@triton.jit
def _best_of_blocks(
    logits_MC, target_ids_C, place_M, position_M, seed_Q, temperature_Q, best_MBW,
    C, B, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pdl_launch()
    b = tl.program_id(0)
    m = tl.program_id(1).to(tl.int64)
    index = b * BLOCK + tl.arange(0, BLOCK)
    target_ids = tl.load(target_ids_C + index, mask=index < C, other=0)
    pdl_wait()
    logits = tl.load(logits_MC + m * C + index, mask=index < C, other=-float("inf"))
    position = tl.load(position_M + m)
    if position < 0:
        return
    place = tl.load(place_M + m)
    temperature = tl.load(temperature_Q + place)
    z = logits
    if temperature >= GREEDY_BELOW:
        z = tl.fma(logits, tl.div_rn(1.0, temperature), gumbel_of_tokens(tl.load(seed_Q + place), target_ids, position + 1))
    candidates = _packed(z, index)
    for w in tl.static_range(W):
        best = tl.max(candidates)
        tl.store(best_MBW + (m * B + b) * W + w, best)
        candidates = tl.where(candidates == best, NOTHING, candidates)


@triton.jit
def _best_of_rows(best_MBW, target_ids_C, position_M, token_MW, z_MW, size, W: tl.constexpr, TILE: tl.constexpr):
    pdl_launch()
    m = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, TILE)
    pdl_wait()
    alive = tl.load(position_M + m) >= 0
    candidates = tl.load(best_MBW + m * size + lanes, mask=lanes < tl.where(alive, size, 0), other=NOTHING)
    for w in tl.static_range(W):
        best = tl.max(candidates)
        found = best != NOTHING
        index = (best & COMPLEMENT).to(tl.int32) ^ COMPLEMENT
        tl.store(token_MW + m * W + w, tl.load(target_ids_C + index, mask=found, other=-1))
        tl.store(z_MW + m * W + w, tl.where(found, value_of((best >> 32).to(tl.int32)), -float("inf")))
        candidates = tl.where(candidates == best, NOTHING, candidates)


def children(
    logits_MC: torch.Tensor,  # float32
    target_ids_C: torch.Tensor,  # int32, the target's id of every draft token
    place_M: torch.Tensor,  # int32
    position_M: torch.Tensor,  # int32, of the row, -1 dead; its children stand one later
    seed_Q: torch.Tensor,  # int64, the bits of a uint64
    temperature_Q: torch.Tensor,  # float32
    *,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(token_MW int32 target ids, z_MW float32), best first, W = max(width, 2); missing ones are (-1, -inf)."""
    M, C = logits_MC.shape
    B, W = triton.cdiv(C, BLOCK), max(width, 2)
    best_MBW = seed_Q.new_empty((M, B, W))
    token_MW, z_MW = place_M.new_empty((M, W)), logits_MC.new_empty((M, W))
    _best_of_blocks[(B, M)](
        logits_MC, target_ids_C, place_M, position_M, seed_Q, temperature_Q, best_MBW,
        C, B, W=W, BLOCK=BLOCK, num_warps=BLOCK_WARPS, **PDL,
    )  # fmt: skip
    _best_of_rows[(M,)](
        best_MBW, target_ids_C, position_M, token_MW, z_MW, B * W,
        W=W, TILE=triton.next_power_of_2(B * W), num_warps=MERGE_WARPS, **PDL,
    )  # fmt: skip
    return token_MW, z_MW
