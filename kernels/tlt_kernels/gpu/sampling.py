"""Sampling on the GPU: logits to token and log-probs, the definitions of `tlt_kernels.cpu.sampling` in two launches.

The first cuts the vocabulary in blocks of fixed width, each with its best score, its maximum and its sum of exponentials; the second
merges the blocks of a row in fixed order. A row's bits depend on its own logits and parameters only. Filters (`filters.cuts`) reach
the first launch as one threshold per row, so a row without filters has the same bits whether its neighbours have some or not.
A row with a NaN or without a finite maximum gets token 0 and NaN log-probs, a dead row token -1 and log-probs 0.

Legend: S sampled rows, V vocabulary, B blocks of the vocabulary, R rows of the extend, Q places.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tlt_kernels.gpu.filters import cuts
from tlt_kernels.gpu.noise import gumbel_block, log
from tlt_kernels.gpu.target import PDL, pdl_launch, pdl_wait
from tlt_kernels.gpu.temperature import GREEDY_BELOW, divided, scale_of

BLOCK = 1024  # width of one partial sum; changing it changes bits
BLOCK_WARPS = 4
MERGE_WARPS = 1


class Sampled(NamedTuple):
    token_S: torch.Tensor  # int32
    logprob_S: torch.Tensor  # float32, under the processed distribution
    raw_logprob_S: torch.Tensor | None  # float32, under the logits themselves at temperature 1


@triton.jit
def _sum_of_exponentials(z, top):
    return tl.sum(tl.exp(z - tl.where(top == -float("inf"), 0.0, top)))


@triton.jit
def _sample_blocks(
    logits_SV, row_S, position_R, place_R, seed_Q, temperature_Q, cut_S, last_S,
    score_SB, token_SB, z_SB, top_SB, sum_SB, raw_top_SB, raw_sum_SB,
    V, B, FILTERED: tl.constexpr, RAW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pdl_launch()
    b = tl.program_id(0)
    s = tl.program_id(1).to(tl.int64)
    tokens = b * BLOCK + tl.arange(0, BLOCK)
    pdl_wait()
    logits = tl.load(logits_SV + s * V + tokens, mask=tokens < V, other=-float("inf"))
    row = tl.load(row_S + s)
    if row < 0:
        return
    position = tl.load(position_R + row)
    place = tl.load(place_R + row)
    temperature = tl.load(temperature_Q + place)
    z = divided(logits, scale_of(temperature))
    if FILTERED:
        cut, last = tl.load(cut_S + s), tl.load(last_S + s)
        z = tl.where((z < cut) | ((z == cut) & (tokens > last)), -float("inf"), z)
    score = z
    if temperature >= GREEDY_BELOW:
        score = z + gumbel_block(tl.load(seed_Q + place), b * BLOCK, position + 1, BLOCK)
    best = tl.max(score)
    token = tl.minimum(tl.min(tl.where(score == best, tokens, V)), V - 1)
    top = tl.max(z)
    at = s * B + b
    tl.store(score_SB + at, best)
    tl.store(token_SB + at, token)
    tl.store(z_SB + at, divided(tl.load(logits_SV + s * V + token), scale_of(temperature)))
    tl.store(top_SB + at, top)
    tl.store(sum_SB + at, _sum_of_exponentials(z, top))
    if RAW:
        raw_top = tl.max(logits)
        tl.store(raw_top_SB + at, raw_top)
        tl.store(raw_sum_SB + at, _sum_of_exponentials(logits, raw_top))


@triton.jit
def _log_of_softmax(x, top_B, sum_B):
    """x minus the logsumexp of the blocks; NaN if one is NaN or none is finite."""
    top = tl.max(top_B)
    finite = (top > -float("inf")) & (top < float("inf"))
    total = tl.sum(sum_B * tl.exp(top_B - tl.where(finite, top, 0.0)))
    good = finite & (total >= 1.0)
    return tl.where(good, (x - top) - log(tl.where(good, total, 1.0)), float("nan")), good


@triton.jit
def _merge_blocks(
    logits_SV, row_S, score_SB, token_SB, z_SB, top_SB, sum_SB, raw_top_SB, raw_sum_SB,
    token_S, logprob_S, raw_logprob_S, V, B, RAW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    pdl_launch()
    s = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, TILE)
    inside = blocks < B
    at = s * B + blocks
    pdl_wait()
    row = tl.load(row_S + s)
    if row < 0:
        tl.store(token_S + s, -1)
        tl.store(logprob_S + s, 0.0)
        if RAW:
            tl.store(raw_logprob_S + s, 0.0)
        return
    score_B = tl.load(score_SB + at, mask=inside, other=-float("inf"))
    token_B = tl.load(token_SB + at, mask=inside, other=0)
    z_B = tl.load(z_SB + at, mask=inside, other=0.0)
    top_B = tl.load(top_SB + at, mask=inside, other=-float("inf"))
    sum_B = tl.load(sum_SB + at, mask=inside, other=0.0)
    best = tl.max(score_B)
    winner = tl.min(tl.where(score_B == best, blocks, B))
    token = tl.sum(tl.where(blocks == winner, token_B, 0))
    logprob, good = _log_of_softmax(tl.sum(tl.where(blocks == winner, z_B, 0.0)), top_B, sum_B)
    token = tl.where(good, token, 0)
    tl.store(token_S + s, token)
    tl.store(logprob_S + s, logprob)
    if RAW:
        raw_top_B = tl.load(raw_top_SB + at, mask=inside, other=-float("inf"))
        raw_sum_B = tl.load(raw_sum_SB + at, mask=inside, other=0.0)
        raw_logprob, _ = _log_of_softmax(tl.load(logits_SV + s * V + token), raw_top_B, raw_sum_B)
        tl.store(raw_logprob_S + s, raw_logprob)


def sample(
    logits_SV: torch.Tensor,  # float32
    row_S: torch.Tensor,  # int32, the row of the extend that the logits belong to, -1 dead
    position_R: torch.Tensor,  # int32, of the row; the sampled token stands one later
    place_R: torch.Tensor,  # int32
    seed_Q: torch.Tensor,  # int64, the bits of a uint64
    temperature_Q: torch.Tensor,  # float32
    top_k_Q: torch.Tensor,  # int32, 0 = all
    top_p_Q: torch.Tensor,  # float32
    min_p_Q: torch.Tensor,  # float32
    *,
    filtered: bool,  # whether any row may have a filter
    raw: bool = False,
) -> Sampled:
    """The token of every sampled row and its log-probs."""
    S, V = logits_SV.shape
    B = triton.cdiv(V, BLOCK)
    score_SB, z_SB, top_SB, sum_SB, raw_top_SB, raw_sum_SB = logits_SV.new_empty((6, S, B)).unbind()
    token_SB = row_S.new_empty((S, B))
    token_S, logprob_S = torch.empty_like(row_S), logits_SV.new_empty(S)
    raw_logprob_S = logits_SV.new_empty(S) if raw else None
    cut_S, last_S = None, None
    if filtered:
        cut_S, last_S = cuts(logits_SV, row_S, place_R, temperature_Q, top_k_Q, top_p_Q, min_p_Q)
    blocks = (score_SB, token_SB, z_SB, top_SB, sum_SB, raw_top_SB, raw_sum_SB)
    _sample_blocks[(B, S)](
        logits_SV, row_S, position_R, place_R, seed_Q, temperature_Q, cut_S, last_S, *blocks,
        V, B, FILTERED=filtered, RAW=raw, BLOCK=BLOCK, num_warps=BLOCK_WARPS, **PDL,
    )  # fmt: skip
    _merge_blocks[(S,)](
        logits_SV, row_S, *blocks, token_S, logprob_S, raw_logprob_S,
        V, B, RAW=raw, TILE=triton.next_power_of_2(B), num_warps=MERGE_WARPS, **PDL,
    )  # fmt: skip
    return Sampled(token_S, logprob_S, raw_logprob_S)
