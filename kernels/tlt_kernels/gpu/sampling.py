"""Sampling on the GPU: logits to token and log-prob, by the definitions of
`tlt_kernels.cpu.sampling`, in two launches.

The first launch cuts the vocabulary into blocks of fixed width, each with its best score, its
maximum and its sum of exponentials; the second merges the blocks of a row in fixed order. A row's
bits depend only on its logits and parameters. Filters (`filters.cuts`) reach the first launch as
one threshold per row, so a row without filters has the same bits whether or not its neighbours have
some. A row with a NaN or without a finite maximum gets token 0 and a NaN log-prob, a dead row token
-1 and log-prob 0. `report.py` has further reports on a token.

Legend: S sampled rows, V vocabulary, B blocks of the vocabulary, R rows of the extend, Q batch
slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tlt_kernels.gpu.exchange import RankPeers
from tlt_kernels.gpu.filters import cuts
from tlt_kernels.gpu.noise import fast_exp, gumbel_above, gumbel_of_word, log, words_of_quads
from tlt_kernels.gpu.target import PDL, pdl_launch, pdl_wait
from tlt_kernels.gpu.temperature import GREEDY_BELOW, divided, scale_of
from tlt_kernels.gpu.tensors import BatchSlots, RowTable, Samples

BLOCK = 1024  # width of one partial sum; changing it changes bits
BLOCK_WARPS = 1
MERGE_WARPS = 1
NONE = tl.constexpr(2**30)  # above every token
# Units of 1 in the sum of exponentials: sums of up to 2^22 tokens fit 64 bits.
UNIT = tl.constexpr(2.0**40)


@triton.jit
def quads(tile, N: tl.constexpr):
    """Return lanes 4 n, 4 n + 1, 4 n + 2 and 4 n + 3 of a tile of 4 N."""
    even, odd = tl.split(tl.reshape(tile, (N, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def top_of(a, b, c, d):
    return tl.max(tl.maximum(tl.maximum(a, b), tl.maximum(c, d)))


@triton.jit
def _first(best, a, b, c, d, first, N: tl.constexpr):
    """Return the lowest token whose score is `best`."""
    lane = tl.where(c == best, 2, tl.where(d == best, 3, NONE))
    lane = tl.where(a == best, 0, tl.where(b == best, 1, lane))
    return first + tl.min(lane + 4 * tl.arange(0, N))


@triton.jit
def sum_of_exponentials(a, b, c, d, top):
    shift = tl.where(top == -float("inf"), 0.0, top)
    return tl.sum(
        (fast_exp(a - shift) + fast_exp(b - shift)) + (fast_exp(c - shift) + fast_exp(d - shift))
    )


@triton.jit
def _better(bound_0, z_0, word_0, lane_0, bound_1, z_1, word_1, lane_1):
    """Return the candidate with the larger bound, and the other one's bound."""
    other = bound_1 > bound_0
    z, word, lane = (
        tl.where(other, z_1, z_0),
        tl.where(other, word_1, word_0),
        tl.where(other, lane_1, lane_0),
    )
    return tl.maximum(bound_0, bound_1), z, word, lane, tl.minimum(bound_0, bound_1)


@triton.jit
def _best_noisy(a, b, c, d, seed, position, first, N: tl.constexpr):
    """Return (best z + G, its token). Of four neighbours only the one with the largest bound of its
    score is computed exactly. If another's bound reaches the best score found, all are.
    """
    word_a, word_b, word_c, word_d = words_of_quads(seed, first, position, N)
    bound_a, bound_b = a + gumbel_above(word_a), b + gumbel_above(word_b)
    bound_c, bound_d = c + gumbel_above(word_c), d + gumbel_above(word_d)
    bound_ab, z_ab, word_ab, lane_ab, lost_ab = _better(
        bound_a, a, word_a, 0, bound_b, b, word_b, 1
    )
    bound_cd, z_cd, word_cd, lane_cd, lost_cd = _better(
        bound_c, c, word_c, 2, bound_d, d, word_d, 3
    )
    _, z, word, lane, lost = _better(
        bound_ab, z_ab, word_ab, lane_ab, bound_cd, z_cd, word_cd, lane_cd
    )
    score = z + gumbel_of_word(word)
    best = tl.max(score)
    token = first + tl.min(tl.where(score == best, lane + 4 * tl.arange(0, N), NONE))
    rest = tl.max(tl.maximum(lost, tl.maximum(lost_ab, lost_cd)))
    margin = (
        1e-3 + tl.abs(best) * 2.0**-20
    )  # covers the bound's error and the rounding of the scores
    if (rest >= best - margin) & (rest > -float("inf")):
        score_a, score_b = a + gumbel_of_word(word_a), b + gumbel_of_word(word_b)
        score_c, score_d = c + gumbel_of_word(word_c), d + gumbel_of_word(word_d)
        best = top_of(score_a, score_b, score_c, score_d)
        token = _first(best, score_a, score_b, score_c, score_d, first, N)
    return best, token


@triton.jit
def _sample_blocks(
    logits_SV, row_S, position_R, batch_slot_R, seed_Q, temperature_Q, cut_S, last_S,
    score_SB, token_SB, z_SB, top_SB, sum_SB,
    V, B, FILTERED: tl.constexpr, BLOCK: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    """Sample in one block per program. The logits are those of V tokens from START on."""
    pdl_launch()
    block = tl.program_id(0)
    s = tl.program_id(1).to(tl.int64)
    first = START + block * BLOCK
    tokens = first + tl.arange(0, BLOCK)
    V += START
    logits_SV += s * (V - START) - START
    N: tl.constexpr = BLOCK // 4
    pdl_wait()
    logits = tl.load(logits_SV + tokens, mask=tokens < V, other=-float("inf"))
    row = tl.load(row_S + s)
    if row < 0:
        return
    position = tl.load(position_R + row)
    batch_slot = tl.load(batch_slot_R + row)
    temperature, seed = tl.load(temperature_Q + batch_slot), tl.load(seed_Q + batch_slot)
    z = logits
    if temperature != 1.0:
        z = divided(logits, scale_of(temperature))
    if FILTERED:
        cut, last = tl.load(cut_S + s), tl.load(last_S + s)
        z = tl.where((z < cut) | ((z == cut) & (tokens > last)), -float("inf"), z)
    a, b, c, d = quads(z, N)
    top = top_of(a, b, c, d)
    noisy = temperature >= GREEDY_BELOW
    if FILTERED:
        noisy = noisy & (top > -float("inf"))  # most blocks have nothing to compare
    if noisy:
        best, token = _best_noisy(a, b, c, d, seed, position + 1, first, N)
    else:
        best, token = top, _first(top, a, b, c, d, first, N)
    token = tl.minimum(token, V - 1)
    at = s * B + block
    tl.store(score_SB + at, best)
    tl.store(token_SB + at, token)
    tl.store(z_SB + at, divided(tl.load(logits_SV + token), scale_of(temperature)))
    tl.store(top_SB + at, top)
    tl.store(sum_SB + at, sum_of_exponentials(a, b, c, d, top))


@triton.jit
def normaliser(top_B, sum_B):
    """Return (top, rest) such that (z - top) - rest is z minus the logsumexp of the blocks: NaN if
    one of them is NaN or none is finite.

    The blocks are added as integers. A sum of floats would be in the order of registers, and so
    depend on the alignment of the loads and on the number of ranks.
    """
    top = tl.max(top_B)
    finite = (top > -float("inf")) & (top < float("inf"))
    share_B = sum_B * fast_exp(top_B - tl.where(finite, top, 0.0))
    number_B = share_B == share_B
    units_B = (tl.where(number_B, share_B, 0.0) * UNIT).to(tl.int64)
    total = tl.sum(units_B).to(tl.float32) * (1.0 / UNIT)
    good = finite & (total >= 1.0) & (tl.min(number_B.to(tl.int32)) > 0)
    return top, tl.where(good, log(tl.where(good, total, 1.0)), float("nan"))


@triton.jit
def _merge_blocks(
    row_S, score_SB, token_SB, z_SB, top_SB, sum_SB, token_S, logprob_S, B, stride,
    OWN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Merge the blocks of one row per program. OWN: blocks of each rank, whose results begin
    `stride` apart; 0: there is one rank.
    """
    pdl_launch()
    s = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, TILE)
    inside = blocks < B
    at = s * B + blocks
    if OWN > 0:
        at = (blocks // OWN).to(tl.int64) * stride + s * OWN + blocks % OWN
    pdl_wait()
    row = tl.load(row_S + s)
    if row < 0:
        tl.store(token_S + s, -1)
        tl.store(logprob_S + s, 0.0)
        return
    score_B = tl.load(score_SB + at, mask=inside, other=-float("inf"))
    token_B = tl.load(token_SB + at, mask=inside, other=0)
    z_B = tl.load(z_SB + at, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    top_B = tl.load(top_SB + at, mask=inside, other=-float("inf"))
    sum_B = tl.load(sum_SB + at, mask=inside, other=0.0)
    best = tl.max(score_B)
    winner = tl.min(tl.where(score_B == best, blocks, B))
    token = tl.sum(tl.where(blocks == winner, token_B, 0))
    top, rest = normaliser(top_B, sum_B)
    tl.store(token_S + s, tl.where(rest == rest, token, 0))
    z = tl.sum(tl.where(blocks == winner, z_B, 0)).to(tl.float32, bitcast=True)
    tl.store(logprob_S + s, (z - top) - rest)


def sample(
    logits_SV: torch.Tensor,  # float32
    row_S: torch.Tensor,  # int32, the row of the extend that the logits belong to, -1 dead
    rows: RowTable,
    batch_slots: BatchSlots,
    *,
    filtered: bool,  # whether any row may have a filter
) -> Samples:
    """Return the token of every sampled row and its log-prob. The token stands one position after
    the row.
    """
    S, V = logits_SV.shape
    B = triton.cdiv(V, BLOCK)
    # Separate allocations, all aligned: otherwise the kernel has other variants.
    score_SB, z_SB, top_SB, sum_SB = (logits_SV.new_empty((S, B)) for _ in range(4))
    token_SB = row_S.new_empty((S, B))
    token_S, logprob_S = torch.empty_like(row_S), logits_SV.new_empty(S)
    filtered = filtered and V > 1  # filters always leave the best token
    cut_S, last_S = None, None
    if filtered:
        cut_S, last_S = cuts(logits_SV, row_S, rows, batch_slots)
    blocks = (score_SB, token_SB, z_SB, top_SB, sum_SB)
    _sample_blocks[(B, S)](
        logits_SV, row_S, rows.position_R, rows.batch_slot_R,
        batch_slots.seed_Q, batch_slots.temperature_Q, cut_S, last_S, *blocks,
        V, B, FILTERED=filtered, BLOCK=BLOCK, START=0, num_warps=BLOCK_WARPS, **PDL,
    )  # fmt: skip
    _merge_blocks[(S,)](
        row_S,
        *blocks,
        token_S,
        logprob_S,
        B,
        0,
        OWN=0,
        TILE=triton.next_power_of_2(B),
        num_warps=MERGE_WARPS,
        **PDL,
    )
    return Samples(token_S, logprob_S)


def blocks_of_rank(vocabulary: int, ranks: int) -> int:
    """Return the number of blocks of each rank but the last, which may have fewer; 0 if the last
    would have none.
    """
    blocks = triton.cdiv(vocabulary, BLOCK)
    own = triton.cdiv(blocks, ranks)
    return own if (ranks - 1) * own < blocks else 0


def block_words(samples: int, own: int) -> int:
    """Return the number of 4-byte words of a rank's block results."""
    return 5 * _results(samples, own)


def _results(samples: int, own: int) -> int:
    return -(-samples * own // 4) * 4  # each kind of them begins at 16 bytes


def sample_shared(
    peers: RankPeers,
    logits_SW: torch.Tensor,  # float32, of the tokens of this rank
    vocabulary: int,
    row_S: torch.Tensor,
    rows: RowTable,
    batch_slots: BatchSlots,
) -> Samples:
    """Return the result of `sample` without filters for the logits of all ranks, each of which has
    whole blocks. Their results are exchanged through the beginning of room 0.
    """
    (S, W), own, ranks = logits_SW.shape, blocks_of_rank(vocabulary, peers.ranks), peers.ranks
    size, start = _results(S, own), peers.rank * own * BLOCK
    mine = peers.room(0)[: block_words(S, own)]
    found = torch.empty(ranks, len(mine), dtype=torch.float32, device=mine.device)
    blocks = mine.view(5, size).unbind()
    score, token, z, top, total = blocks
    _sample_blocks[(own, S)](
        logits_SW, row_S, rows.position_R, rows.batch_slot_R,
        batch_slots.seed_Q, batch_slots.temperature_Q, None, None,
        score, token.view(torch.int32), z, top, total,
        W, own, FILTERED=False, BLOCK=BLOCK, START=start, num_warps=BLOCK_WARPS, **PDL,
    )  # fmt: skip
    peers.gather(mine, found)
    score, token, z, top, total = found[0].view(5, size).unbind()
    token_S, logprob_S = torch.empty_like(row_S), logits_SW.new_empty(S)
    blocks_in_all = triton.cdiv(vocabulary, BLOCK)
    _merge_blocks[(S,)](
        row_S,
        score,
        token.view(torch.int32),
        z,
        top,
        total,
        token_S,
        logprob_S,
        blocks_in_all,
        len(mine),
        OWN=own,
        TILE=triton.next_power_of_2(blocks_in_all),
        num_warps=MERGE_WARPS,
        **PDL,
    )
    return Samples(token_S, logprob_S)
