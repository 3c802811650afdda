"""The best tokens of sampled rows with their log-probs, for requests that ask for them.

They rank by z under the distribution that was sampled from: scaled, filtered, without noise. A log-prob is that of the sampled token
plus the difference of their z, so the sampled token has the same bits in both places.

Legend: S sampled rows, V vocabulary, B blocks of the vocabulary, K alternatives, R rows of the extend, Q places.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tlt_kernels.gpu.children import NOTHING, best_of
from tlt_kernels.gpu.filters import cuts
from tlt_kernels.gpu.ordering import key_of, value_of
from tlt_kernels.gpu.sampling import Sampled
from tlt_kernels.gpu.target import PDL, pdl_launch, pdl_wait
from tlt_kernels.gpu.temperature import divided, scale_of

BLOCK = 1024


@triton.jit
def _best_of_blocks(
    logits_SV, row_S, place_R, temperature_Q, cut_S, last_S, key_SBK, token_SBK,
    V, B, FILTERED: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pdl_launch()
    b = tl.program_id(0)
    s = tl.program_id(1).to(tl.int64)
    tokens = b * BLOCK + tl.arange(0, BLOCK)
    pdl_wait()
    row = tl.load(row_S + s)
    if row < 0:
        return
    logits = tl.load(logits_SV + s * V + tokens, mask=tokens < V, other=-float("inf"))
    z = divided(logits, scale_of(tl.load(temperature_Q + tl.load(place_R + row))))
    if FILTERED:
        cut = tl.load(cut_S + s)
        z = tl.where((z < cut) | ((z == cut) & (tokens > tl.load(last_S + s))), -float("inf"), z)
    best_K, at_K = best_of(tl.where(z > -float("inf"), key_of(z), NOTHING), BLOCK, K, WIDE)
    ranks = tl.arange(0, WIDE)
    tl.store(key_SBK + (s * B + b) * K + ranks, best_K, mask=ranks < K)
    tl.store(token_SBK + (s * B + b) * K + ranks, b * BLOCK + at_K, mask=ranks < K)


@triton.jit
def _best_of_rows(
    logits_SV, row_S, place_R, temperature_Q, key_SBK, token_SBK, token_S, logprob_S, id_SK, logprob_SK,
    V, size, K: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    pdl_launch()
    s = tl.program_id(0).to(tl.int64)
    ranks = tl.arange(0, WIDE)
    lanes = tl.arange(0, TILE)
    pdl_wait()
    row = tl.load(row_S + s)
    logprob = tl.load(logprob_S + s)
    good = (row >= 0) & (logprob == logprob)
    keys = tl.load(key_SBK + s * size + lanes, mask=lanes < tl.where(good, size, 0), other=NOTHING)
    best_K, at_K = best_of(keys, TILE, K, WIDE)
    found = best_K != NOTHING
    temperature = tl.load(temperature_Q + tl.load(place_R + tl.maximum(row, 0)))
    sampled = divided(tl.load(logits_SV + s * V + tl.maximum(tl.load(token_S + s), 0)), scale_of(temperature))
    tl.store(id_SK + s * K + ranks, tl.load(token_SBK + s * size + at_K, mask=found, other=-1), mask=ranks < K)
    tl.store(logprob_SK + s * K + ranks, tl.where(found, (value_of(best_K) - sampled) + logprob, -float("inf")), mask=ranks < K)


def top_logprobs(
    logits_SV: torch.Tensor,
    row_S: torch.Tensor,
    place_R: torch.Tensor,
    temperature_Q: torch.Tensor,
    top_k_Q: torch.Tensor,
    top_p_Q: torch.Tensor,
    min_p_Q: torch.Tensor,
    sampled: Sampled,  # what `sample` returned for these rows
    k: int,
    *,
    filtered: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids_SK int32, logprobs_SK float32), best first, ties by id; where fewer tokens are left, and in broken rows, (-1, -inf)."""
    S, V = logits_SV.shape
    B, WIDE = triton.cdiv(V, BLOCK), triton.next_power_of_2(k)
    key_SBK, token_SBK = row_S.new_empty((2, S, B, k)).unbind()
    ids_SK, logprobs_SK = row_S.new_empty((S, k)), logits_SV.new_empty((S, k))
    filtered = filtered and V > 1
    cut_S, last_S = None, None
    if filtered:
        cut_S, last_S = cuts(logits_SV, row_S, place_R, temperature_Q, top_k_Q, top_p_Q, min_p_Q)
    _best_of_blocks[(B, S)](
        logits_SV, row_S, place_R, temperature_Q, cut_S, last_S, key_SBK, token_SBK,
        V, B, FILTERED=filtered, K=k, WIDE=WIDE, BLOCK=BLOCK, num_warps=4, **PDL,
    )  # fmt: skip
    _best_of_rows[(S,)](
        logits_SV, row_S, place_R, temperature_Q, key_SBK, token_SBK, sampled.token_S, sampled.logprob_S, ids_SK, logprobs_SK,
        V, B * k, K=k, WIDE=WIDE, TILE=triton.next_power_of_2(B * k), num_warps=8, **PDL,
    )  # fmt: skip
    return ids_SK, logprobs_SK
