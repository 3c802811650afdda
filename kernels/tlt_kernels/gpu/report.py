"""Reports on sampled tokens: the raw log-prob of a token, and the best tokens of its row, read from
the logits afterwards.

No token depends on them. `emitted` finds the samples that a step's entries emitted; `score` reads
those rows and skips all others. A row's values depend on its own logits, parameters and token only.
The best tokens are found without a sort of the vocabulary: top_k is a cut (`filters.cuts`), and the
few tokens above it are listed and ordered. Definitions are those of `tlt_kernels.cpu.sampling`.

Legend: A entries that ask, N tokens of an entry, S sampled rows, V vocabulary, B blocks of the
vocabulary, K best tokens, Q batch slots; otherwise as in `tensors.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt_kernels.filters import Filters
from tlt_kernels.gpu.accept import HEAD
from tlt_kernels.gpu.filters import cuts
from tlt_kernels.gpu.ordering import key_of, value_of
from tlt_kernels.gpu.sampling import (
    BLOCK,
    BLOCK_WARPS,
    MERGE_WARPS,
    normaliser,
    quads,
    sum_of_exponentials,
    top_of,
)
from tlt_kernels.gpu.target import PDL, pdl_launch, pdl_wait
from tlt_kernels.gpu.temperature import GREEDY_BELOW, divided, scale_of
from tlt_kernels.gpu.tensors import BatchSlots, KeptRows, RowTable, Trees, filters_table

ROWS = 64  # rows of a tree read at once
TILE = 64  # listed tokens per program
NOTHING = tl.constexpr(-(2**63))  # orders below every listed token


class Emitted(NamedTuple):
    sample_AN: Tensor  # int64, where an emitted token was sampled; 0 where there is none
    row_S: Tensor  # int32, the row of a sample that was emitted, else -1
    token_S: Tensor  # int32, its token


class TokenScores(NamedTuple):
    """Log-probs of each sampled row; undefined for rows that were skipped."""

    raw_logprob_S: Tensor  # float32, under the logits themselves at temperature 1
    token_SK: (
        Tensor  # int32, best first, ties by rising id; -1 after the last one that filters keep
    )
    logprob_SK: Tensor  # float32, under the processed distribution; -inf where the token is -1


@triton.jit(do_not_specialize=["B", "F", "N", "V"])
def _emitted(
    entry_A,
    root_E,
    count_E,
    on_path_V,
    outcome_EF,
    sample_AN,
    row_S,
    token_S,
    B,
    F,
    N,
    V,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Find the samples of one requesting entry per program. Rows of a path ascend."""
    pdl_launch()
    a = tl.program_id(0)
    pdl_wait()
    e = tl.load(entry_A + a)
    root, count, emitted = tl.load(root_E + e), tl.load(count_E + e), tl.load(outcome_EF + e * F)
    decodes = e < B
    steps = tl.zeros_like(count)
    for start in range(0, count, ROWS):
        i_I = start + tl.arange(0, ROWS)
        row_I = root + i_I
        path_I = i_I == 0
        if decodes:
            path_I = tl.load(on_path_V + row_I, mask=i_I < count, other=0) != 0
        step_I = steps + tl.cumsum(path_I.to(tl.int32), axis=0) - 1
        steps += tl.sum(path_I.to(tl.int32))
        said_I = path_I & (step_I < emitted)
        sample_I = tl.where(decodes, row_I, V + e - B)
        token_I = tl.load(outcome_EF + e * F + HEAD + step_I, mask=said_I, other=0)
        tl.store(sample_AN + a * N + step_I, sample_I.to(tl.int64), mask=said_I)
        tl.store(row_S + sample_I, row_I, mask=said_I)
        tl.store(token_S + sample_I, token_I, mask=said_I)


def emitted(entry_A: Tensor, outcome_EF: Tensor, trees: Trees, kept: KeptRows) -> Emitted:
    """Return the samples that these entries emitted, as `accept` reported them; entry_A int32."""
    decode_rows, requests = len(kept.on_path_V), len(kept.count_B)
    longest = (outcome_EF.shape[1] - HEAD) // 2
    sample_AN = torch.zeros(len(entry_A), longest, dtype=torch.int64, device=entry_A.device)
    row_S, token_S = torch.full_like(trees.sample_row_S, -1), torch.zeros_like(trees.sample_row_S)
    _emitted[(len(entry_A),)](
        entry_A,
        trees.root_E,
        trees.count_E,
        kept.on_path_V,
        outcome_EF,
        sample_AN,
        row_S,
        token_S,
        requests,
        outcome_EF.shape[1],
        longest,
        decode_rows,
        HEAD=HEAD,
        ROWS=ROWS,
        num_warps=1,
        **PDL,
    )
    return Emitted(sample_AN, row_S, token_S)


@triton.jit
def _within(z, tokens, cut, last):
    """Return a mask of the tokens in the head of the row that ends at (cut, last)."""
    return (z > cut) | ((z == cut) & (tokens <= last))


@triton.jit
def _measure_blocks(
    logits_SV, row_S, batch_slot_R, temperature_Q, cut_S, last_S,
    top_SB, sum_SB, raw_top_SB, raw_sum_SB, V, B, FILTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find maximum and sum of exponentials of each block, for the processed and the raw row."""
    pdl_launch()
    block = tl.program_id(0)
    s = tl.program_id(1).to(tl.int64)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    N: tl.constexpr = BLOCK // 4
    pdl_wait()
    row = tl.load(row_S + s)
    if row < 0:
        return
    logits = tl.load(logits_SV + s * V + tokens, mask=tokens < V, other=-float("inf"))
    z = divided(logits, scale_of(tl.load(temperature_Q + tl.load(batch_slot_R + row))))
    if FILTERED:
        z = tl.where(
            _within(z, tokens, tl.load(cut_S + s), tl.load(last_S + s)) | (z != z), z, -float("inf")
        )
    at = s * B + block
    a, b, c, d = quads(z, N)
    top = top_of(a, b, c, d)
    tl.store(top_SB + at, top)
    tl.store(sum_SB + at, sum_of_exponentials(a, b, c, d, top))
    a, b, c, d = quads(logits, N)
    top = top_of(a, b, c, d)
    tl.store(raw_top_SB + at, top)
    tl.store(raw_sum_SB + at, sum_of_exponentials(a, b, c, d, top))


@triton.jit
def _merge_blocks(
    logits_SV, row_S, token_S, top_SB, sum_SB, raw_top_SB, raw_sum_SB,
    top_S, rest_S, raw_logprob_S, V, B, TILE: tl.constexpr,
):  # fmt: skip
    pdl_launch()
    s = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, TILE)
    at = s * B + blocks
    pdl_wait()
    if tl.load(row_S + s) < 0:
        return
    inside = blocks < B
    top, rest = normaliser(
        tl.load(top_SB + at, mask=inside, other=-float("inf")),
        tl.load(sum_SB + at, mask=inside, other=0.0),
    )
    tl.store(top_S + s, top)
    tl.store(rest_S + s, rest)
    top, rest = normaliser(
        tl.load(raw_top_SB + at, mask=inside, other=-float("inf")),
        tl.load(raw_sum_SB + at, mask=inside, other=0.0),
    )
    tl.store(raw_logprob_S + s, (tl.load(logits_SV + s * V + tl.load(token_S + s)) - top) - rest)


@triton.jit(do_not_specialize=["K"])
def _list_best(
    logits_SV, row_S, batch_slot_R, temperature_Q, best_cut_S, best_last_S, cut_S, last_S,
    listed_S, item_SK, V, K, FILTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """List the tokens within both heads, in any order, as integers with the order (z, descending
    id).
    """
    pdl_launch()
    s = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pdl_wait()
    row = tl.load(row_S + s)
    if row < 0:
        return
    logits = tl.load(logits_SV + s * V + tokens, mask=tokens < V, other=-float("inf"))
    z = divided(logits, scale_of(tl.load(temperature_Q + tl.load(batch_slot_R + row))))
    wanted = (z > -float("inf")) & _within(
        z, tokens, tl.load(best_cut_S + s), tl.load(best_last_S + s)
    )
    if FILTERED:
        wanted &= _within(z, tokens, tl.load(cut_S + s), tl.load(last_S + s))
    at = tl.atomic_add(listed_S + s + tl.zeros((BLOCK,), tl.int32), 1, mask=wanted, sem="relaxed")
    item = (key_of(z).to(tl.int64) << 32) | (tokens ^ 0x7FFFFFFF).to(tl.int64)
    tl.store(item_SK + s * K + at, item, mask=wanted & (at < K))  # a broken row has more


@triton.jit(do_not_specialize=["K"])
def _name_best(row_S, item_SK, top_S, rest_S, token_SK, logprob_SK, K, TILE: tl.constexpr):
    """Turn ordered items into tokens and log-probs."""
    pdl_launch()
    s = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * TILE + tl.arange(0, TILE)
    pdl_wait()
    if tl.load(row_S + s) < 0:
        return
    item = tl.load(item_SK + s * K + k, mask=k < K, other=0)
    listed = item != NOTHING
    z = value_of((item >> 32).to(tl.int32))
    token = (item & 0x7FFFFFFF).to(tl.int32) ^ 0x7FFFFFFF
    logprob = (z - tl.load(top_S + s)) - tl.load(rest_S + s)
    tl.store(token_SK + s * K + k, tl.where(listed, token, -1), mask=k < K)
    tl.store(logprob_SK + s * K + k, tl.where(listed, logprob, -float("inf")), mask=k < K)


def score(
    logits_SV: Tensor,  # float32
    row_S: Tensor,  # int32, the row of the extend that the logits belong to, -1 to be skipped
    token_S: Tensor,  # int32, the token sampled there
    rows: RowTable,
    batch_slots: BatchSlots,
    *,
    filtered: bool,  # whether any row may have a filter
    best: int,  # tokens to report per row; 0 = none
) -> TokenScores:
    """Return the raw log-prob of every sampled token, and the best tokens of its row with their
    log-probs.
    """
    S, V = logits_SV.shape
    B, K = triton.cdiv(V, BLOCK), min(best, V)
    batch_slot_R, temperature_Q = rows.batch_slot_R, batch_slots.temperature_Q
    top_SB, sum_SB, raw_top_SB, raw_sum_SB = (logits_SV.new_empty(S, B) for _ in range(4))
    top_S, rest_S, raw_logprob_S = (logits_SV.new_empty(S) for _ in range(3))
    token_SK, logprob_SK = row_S.new_empty((S, K)), logits_SV.new_empty((S, K))
    cut_S, last_S = None, None
    if filtered:
        cut_S, last_S = cuts(logits_SV, row_S, rows, batch_slots)
    _measure_blocks[(B, S)](
        logits_SV, row_S, batch_slot_R, temperature_Q, cut_S, last_S,
        top_SB, sum_SB, raw_top_SB, raw_sum_SB, V, B,
        FILTERED=filtered, BLOCK=BLOCK, num_warps=BLOCK_WARPS, **PDL,
    )  # fmt: skip
    _merge_blocks[(S,)](
        logits_SV, row_S, token_S, top_SB, sum_SB, raw_top_SB, raw_sum_SB,
        top_S, rest_S, raw_logprob_S, V, B,
        TILE=triton.next_power_of_2(B), num_warps=MERGE_WARPS, **PDL,
    )  # fmt: skip
    if K:
        unfiltered = batch_slots._replace(
            temperature_Q=torch.where(temperature_Q < GREEDY_BELOW.value, 1.0, temperature_Q),
            filters_QF=filters_table(
                Filters(top_k=K), len(batch_slots.filters_QF), logits_SV.device
            ),
        )
        best_cut_S, best_last_S = cuts(logits_SV, row_S, rows, unfiltered)
        item_SK = torch.full((S, K), NOTHING.value, dtype=torch.int64, device=logits_SV.device)
        _list_best[(B, S)](
            logits_SV, row_S, batch_slot_R, temperature_Q, best_cut_S, best_last_S, cut_S, last_S,
            torch.zeros_like(row_S), item_SK, V, K,
            FILTERED=filtered, BLOCK=BLOCK, num_warps=BLOCK_WARPS, **PDL,
        )  # fmt: skip
        item_SK = item_SK.sort(dim=1, descending=True).values
        _name_best[(triton.cdiv(K, TILE), S)](
            row_S, item_SK, top_S, rest_S, token_SK, logprob_SK, K, TILE=TILE, num_warps=1, **PDL
        )
    return TokenScores(raw_logprob_S, token_SK, logprob_SK)
