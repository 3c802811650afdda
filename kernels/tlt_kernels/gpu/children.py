"""Children of draft-tree nodes on the GPU, ranked with the noise that the target will sample with.

z = logits / T + G(seed, position, target id) over the draft vocabulary, T by its float32
reciprocal; a greedy row ranks by its logits. The first launch leaves the best W of every block of
the vocabulary, the second the best W of a row. Each takes W rounds of a maximum over integer keys
and of a minimum over indices, both of which are single instructions of a warp. Ties stay in the
order of their indices, so the minimum is the first index of a maximum. CPU twin:
`tlt_kernels.cpu.growth.children`.

Ranks that share a draft head each have the logits of neighbouring draft tokens. They exchange the
best W of their blocks, and each merges all of these in rank order, which is the order of draft
tokens: the same children as with one rank, for any block bounds.

Legend: M rows, C draft vocabulary, W children per row, B blocks of the vocabulary, Q batch slots, T
ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tlt_kernels.gpu.agreement import SUM_FLOATS
from tlt_kernels.gpu.exchange import RankPeers
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
    """Return (keys, indices) of the W best candidates, best first, ties by index. Values are looked
    up only after all W are known.
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


@triton.jit
def _place(lanes, m, size, stride, OWN: tl.constexpr):
    """Return the positions of row m's candidates, in the order of draft tokens."""
    if OWN > 0:
        at = (lanes // OWN).to(tl.int64) * stride + m * OWN + lanes % OWN
    else:
        at = m * size + lanes
    return at


@triton.jit(do_not_specialize_on_alignment=["position_M"])
def _best_of_rows(
    key_MBW,
    token_MBW,
    position_M,
    token_MW,
    z_MW,
    size,
    stride,
    OWN: tl.constexpr,
    W: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Merge the `size` candidates of one row per program. OWN: candidates of each rank, whose
    results begin `stride` apart; 0: there is one rank.
    """
    pdl_launch()
    m = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, TILE)
    pdl_wait()
    keys = tl.load(key_MBW + _place(lanes, m, size, stride, OWN), mask=lanes < size, other=NOTHING)
    keys = tl.where(tl.load(position_M + m) < 0, NOTHING, keys)
    best_W, at_W = best_of(keys, TILE, W, WIDE)
    ranks = tl.arange(0, WIDE)
    found = best_W != NOTHING
    token_W = tl.load(token_MBW + _place(at_W, m, size, stride, OWN), mask=found, other=-1)
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
    batch_slot_M = rows.batch_slot_R
    B, W = _blocks(M, C), max(width, 2)
    # Two allocations, both aligned: otherwise the kernel has other variants.
    key_MBW, token_MBW = (batch_slot_M.new_empty((M, B, W)) for _ in range(2))
    _find(logits_MC, target_ids_C, rows, batch_slots, key_MBW, token_MBW, B, W)
    return _merge(key_MBW, token_MBW, rows, M, B * W, W)


def children_shared(
    peers: RankPeers,
    logits_MC: torch.Tensor,  # float32, of the draft tokens of this rank
    target_ids_C: torch.Tensor,  # int32, of the same
    most: int,
    rows: RowTable,
    batch_slots: BatchSlots,
    *,
    width: int,
    turn: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of `children` for the logits of all ranks, the first of which has the first
    draft tokens, and each at most `most`. The best of blocks are exchanged through the end of a
    room, before the sum of `agreement.py`, which no partial sum may reach (`candidate_words`).
    Levels alternate between the rooms: no other exchange may come between two levels.
    """
    M, W = len(logits_MC), max(width, 2)
    B, words = _blocks(M, most), _words(M, most, W)
    mine = peers.room(turn)[:-SUM_FLOATS][-2 * words :].view(torch.int32)
    _find(logits_MC, target_ids_C, rows, batch_slots, mine, mine[words:], B, W)
    found = mine.new_empty(peers.ranks, 2, words)
    peers.gather(mine, found)
    return _merge(
        found[0, 0], found[0, 1], rows, M, peers.ranks * B * W, W, stride=2 * words, own=B * W
    )


def candidate_words(rows: int, most: int, width: int) -> int:
    """Return the number of 4-byte words of a rank's block results, for up to `rows` rows and `most`
    draft tokens.
    """
    W = max(width, 2)
    return 2 * max(_words(min(rows, MAX_FEW), most, W), _words(rows, most, W))


def _words(M: int, most: int, W: int) -> int:
    return -(-M * _blocks(M, most) * W // 4) * 4  # each kind of them begins at 16 bytes


def _block(M: int) -> int:
    return FEW_BLOCK if M <= MAX_FEW else MANY_BLOCK


def _blocks(M: int, tokens: int) -> int:
    return triton.cdiv(tokens, _block(M))


def _find(
    logits_MC: torch.Tensor,
    target_ids_C: torch.Tensor,
    rows: RowTable,
    batch_slots: BatchSlots,
    key_MBW: torch.Tensor,
    token_MBW: torch.Tensor,
    B: int,
    W: int,
) -> None:
    """Write the best W of each of B blocks; the last blocks may be empty."""
    M, C = logits_MC.shape
    _best_of_blocks[(B, M)](
        logits_MC, target_ids_C, rows.batch_slot_R, rows.position_R,
        batch_slots.seed_Q, batch_slots.temperature_Q, key_MBW, token_MBW, C, B,
        W=W, WIDE=triton.next_power_of_2(W), BLOCK=_block(M), num_warps=1, **PDL,
    )  # fmt: skip


def _merge(
    key_MBW: torch.Tensor,
    token_MBW: torch.Tensor,
    rows: RowTable,
    M: int,
    size: int,
    W: int,
    *,
    stride: int = 0,
    own: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best W of every row; `size`, `stride` and `own` as in `_best_of_rows`."""
    TILE = triton.next_power_of_2(size)
    token_MW = rows.batch_slot_R.new_empty((M, W))
    z_MW = token_MW.new_empty((M, W), dtype=torch.float32)
    _best_of_rows[(M,)](
        key_MBW, token_MBW, rows.position_R, token_MW, z_MW, size, stride, OWN=own,
        W=W, WIDE=triton.next_power_of_2(W), TILE=TILE,
        num_warps=min(8, max(1, TILE // MERGED)), **PDL,
    )  # fmt: skip
    return token_MW, z_MW
