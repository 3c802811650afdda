"""Sampling on the CPU: processed logits to token and log-probs, one row after the other.

The engine's sampler calls it. Each row is one sequential path whose order depends on V only, so a
row's bits do not depend on its batch. Order: bias, penalties, min-tokens (`edit_row`), temperature,
min-p, top-k, top-p, noise (`sample_rows`).

Definitions. z = logits / T in float32. min_p drops p < min_p * p_max; top_k keeps the k largest z,
ties to the lowest id; top_p keeps the smallest sorted set whose renormalised mass reaches top_p, at
least one token. Each filter sees the distribution renormalised after the one before. token =
argmax(z + G), ties to the lowest id; its log-prob is z minus the logsumexp of the kept set. T below
`GREEDY_BELOW` is greedy: no noise, no filters, log-probs at temperature 1. A row with a NaN or
without a finite maximum reports NaN log-probs. Slow twin: `tlt_kernels.reference`.

Legend: S rows, V vocabulary, E edited rows, D path depth, K alternatives.
"""

from __future__ import annotations

import math

import numpy as np
from numba import f4, from_dtype, i8, njit
from numba.core.types import Array

from tlt_kernels.cpu.compiled import kernel
from tlt_kernels.cpu.filters import drop, keep_top_k, keep_top_p
from tlt_kernels.cpu.noise import U_MAX, gumbel_of_word, philox4x32, split_seed
from tlt_kernels.filters import Filters

PARAMETERS = np.dtype(
    [
        ("seed", np.uint64),
        ("temperature", np.float32),
        *Filters.columns(np.float64),
        ("logprobs", np.int32),  # best tokens to report
        # 1: also the log-prob under the unprocessed logits at temperature 1
        ("raw_logprobs", np.int32),
    ],
    align=True,
)
GREEDY_BELOW = np.float32(1e-5)
LANES = 16
BLOCK = 1024  # width of one partial sum over the vocabulary
NOISE_BLOCK = 256  # tokens whose noise is drawn together, or skipped together
F32_0, F32_HALF, F32_1 = np.float32(0), np.float32(0.5), np.float32(1)
STEP_F32 = np.float32(2.0**-32)
LOWEST_GUMBEL = math.log(-1 / math.log1p(-U_MAX)) - 1e-6
EXP_FLOOR = np.float32(-87)  # below, exp is taken as 0
LOG2_E, LN2_HIGH, LN2_LOW = (
    np.float32(1.44269504),
    np.float32(0.693359375),
    np.float32(-2.12194440e-4),
)
# Cephes expf: relative error about 1e-7 on [-87, 0].
E5, E4, E3 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
E2, E1, E0 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


@njit(cache=True, forceinline=True)
def exp_nonpositive(x):
    """Return exp(x) of a float32 x <= 0 by IEEE operations only: the same bits in a vector loop, in
    its tail and alone.
    """
    bounded = x if x > EXP_FLOOR else EXP_FLOOR
    n = np.floor(bounded * LOG2_E + F32_HALF)
    r = bounded - n * LN2_HIGH
    r = r - n * LN2_LOW
    y = ((((E5 * r + E4) * r + E3) * r + E2) * r + E1) * r + E0
    y = y * (r * r) + r + F32_1
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return y * power if x > EXP_FLOOR else F32_0


@njit(cache=True)
def scale(logits_V, temperature, z_V, lanes):
    """Compute z = logits / temperature; return its maximum, or NaN if the row has a NaN or no
    finite maximum.
    """
    size = logits_V.shape[0]
    lanes[:] = np.float32(-np.inf)
    nans = 0
    for v in range(size):
        z_V[v] = logits_V[v] / temperature
    for v in range(size):
        nans += z_V[v] != z_V[v]
    full = size // LANES * LANES
    for start in range(0, full, LANES):
        for lane in range(LANES):
            z = z_V[start + lane]
            lanes[lane] = z if z > lanes[lane] else lanes[lane]
    for v in range(full, size):
        lanes[v - full] = max(z_V[v], lanes[v - full])
    top = lanes[0]
    for lane in range(1, LANES):
        top = max(top, lanes[lane])
    return top if nans == 0 and np.isfinite(top) else np.float32(np.nan)


@njit(cache=True)
def weigh(z_V, top, w_V):
    """Compute w = exp(z - top)."""
    for v in range(z_V.shape[0]):
        w_V[v] = exp_nonpositive(z_V[v] - top)


@njit(cache=True)
def total(w_V, lanes):
    """Return the sum of w: float32 lanes within a block, float64 across lanes and blocks, always in
    the same order.
    """
    size = w_V.shape[0]
    result = 0.0
    for block in range(0, size, BLOCK):
        stop = min(block + BLOCK, size)
        full = block + (stop - block) // LANES * LANES
        lanes[:] = F32_0
        for start in range(block, full, LANES):
            for lane in range(LANES):
                lanes[lane] += w_V[start + lane]
        for v in range(full, stop):
            lanes[v - full] += w_V[v]
        partial = 0.0
        for lane in range(LANES):
            partial += np.float64(lanes[lane])
        result += partial
    return result


@njit(cache=True)
def argmax(z_V, top):
    """Return the lowest id with the maximum."""
    for v in range(z_V.shape[0]):
        if z_V[v] == top:
            return v
    return 0


@njit(cache=True)
def argmax_with_noise(z_V, w_V, top, seed, position, words):
    """Return argmax(z + G), ties to the lowest id, with logarithms only for tokens that can win.

    e = -log1p(-u) >= u, so z + G <= top + log(w / u): a token with w < u * exp(best - top) cannot
    win. The maximum itself scores at least top + LOWEST_GUMBEL, the first bound. The margin covers
    the rounding of w, of u and of the score, whose float32 grid grows with |top|. Tokens that pass
    the bound are compared by the exact formula.
    """
    size = z_V.shape[0]
    k0, k1 = split_seed(seed)
    margin = 1e-3 + 2.0**-21 * (abs(np.float64(top)) + 64.0)
    bound = np.float32(math.exp(LOWEST_GUMBEL - margin)) * STEP_F32
    best = np.float32(-np.inf)
    token = 0
    for start in range(0, size, NOISE_BLOCK):
        width = min(NOISE_BLOCK, size - start)
        alive = 0
        for i in range(width):
            alive += w_V[start + i] >= bound * F32_HALF
        if alive == 0:
            continue
        for quad in range((width + 3) // 4):
            a, b, c, d = philox4x32(k0, k1, (start >> 2) + quad, position)
            words[4 * quad], words[4 * quad + 1], words[4 * quad + 2], words[4 * quad + 3] = (
                a,
                b,
                c,
                d,
            )
        hits = 0
        for i in range(width):
            hits += w_V[start + i] >= bound * (np.float32(words[i]) + F32_HALF)
        if hits == 0:
            continue
        for i in range(width):
            v = start + i
            if w_V[v] >= bound * (np.float32(words[i]) + F32_HALF):
                score = z_V[v] + gumbel_of_word(words[i])
                if score > best:
                    best, token = score, v
                    bound = max(
                        bound,
                        np.float32(math.exp(np.float64(best) - np.float64(top) - margin))
                        * STEP_F32,
                    )
    return token


@njit(cache=True)
def best_tokens(z_V, shift, ids_K, logprobs_K):
    """Fill with the largest z, best first, ties by id, as log-probs z - shift. Unused entries keep
    id -1.
    """
    count = 0
    limit = ids_K.shape[0]
    ids_K[:] = -1
    for v in range(z_V.shape[0]):
        if z_V[v] == -np.inf or (count == limit and not z_V[v] > z_V[ids_K[limit - 1]]):
            continue
        at = min(count, limit - 1)
        while at > 0 and z_V[v] > z_V[ids_K[at - 1]]:
            ids_K[at] = ids_K[at - 1]
            at -= 1
        ids_K[at] = v
        count = min(count + 1, limit)
    for i in range(count):
        logprobs_K[i] = np.float32(np.float64(z_V[ids_K[i]]) - shift)


@kernel(
    (
        *(f4[:, ::1], f4[:, ::1], i8[::1], Array(from_dtype(PARAMETERS), 1, "C", readonly=True)),
        *(i8[::1], i8[::1], i8[::1], f4[::1], f4[::1], i8[:, ::1], f4[:, ::1]),
    ),
    nogil=True,
)
def sample_rows(
    logits_SV,
    edited_EV,
    edited_S,
    parameters,
    state_S,
    position_S,
    token_S,
    logprob_S,
    raw_S,
    top_SK,
    top_logprobs_SK,
):
    """Sample every row; row s of sequence state_S[s] reads edited_EV[edited_S[s]] if that is >= 0,
    else its own logits.
    """
    size = logits_SV.shape[1]
    z_V, w_V = np.empty(size, np.float32), np.empty(size, np.float32)
    lanes, words = np.empty(LANES, np.float32), np.empty(NOISE_BLOCK, np.uint32)
    for s in range(logits_SV.shape[0]):
        p = parameters[state_S[s]]
        row_V = edited_EV[edited_S[s]] if edited_S[s] >= 0 else logits_SV[s]
        greedy = p.temperature < GREEDY_BELOW
        top = scale(row_V, F32_1 if greedy else p.temperature, z_V, lanes)
        token_S[s] = 0
        logprob_S[s] = raw_S[s] = np.float32(np.nan)
        top_SK[s] = -1
        if np.isnan(top):
            continue
        weigh(z_V, top, w_V)
        if not greedy:
            if p.min_p > 0.0:
                for v in range(size):
                    if np.float64(w_V[v]) < p.min_p:
                        drop(v, z_V, w_V)
            if 0 < p.top_k < size:
                keep_top_k(p.top_k, top, z_V, w_V)
            if p.top_p < 1.0:
                keep_top_p(p.top_p, top, z_V, w_V)
        shift = np.float64(top) + math.log(total(w_V, lanes))
        token = (
            argmax(z_V, top)
            if greedy
            else argmax_with_noise(z_V, w_V, top, p.seed, position_S[s], words)
        )
        token_S[s] = token
        logprob_S[s] = np.float32(np.float64(z_V[token]) - shift)
        if p.logprobs > 0:
            best_tokens(z_V, shift, top_SK[s, : p.logprobs], top_logprobs_SK[s, : p.logprobs])
        if p.raw_logprobs:
            top = scale(logits_SV[s], F32_1, z_V, lanes)
            weigh(z_V, top, w_V)
            raw_S[s] = np.float32(
                np.float64(z_V[token]) - (np.float64(top) + math.log(total(w_V, lanes)))
            )


@kernel("(f4[:, ::1], i8[::1], f4[::1], i8[:, ::1], f4[:, ::1])", nogil=True)
def score_targets(logits_SV, target_S, logprob_S, top_SK, top_logprobs_SK):
    """Compute log-probs of given tokens, and the K best tokens of each row, under the unprocessed
    logits at temperature 1.
    """
    size = logits_SV.shape[1]
    z_V, w_V, lanes = (
        np.empty(size, np.float32),
        np.empty(size, np.float32),
        np.empty(LANES, np.float32),
    )
    for s in range(logits_SV.shape[0]):
        top = scale(logits_SV[s], F32_1, z_V, lanes)
        weigh(z_V, top, w_V)
        shift = np.float64(top) + math.log(total(w_V, lanes))
        logprob_S[s] = np.float32(np.float64(z_V[target_S[s]]) - shift)
        if top_SK.shape[1] > 0:
            best_tokens(z_V, shift, top_SK[s], top_logprobs_SK[s])


@kernel(
    "(f4[::1], i8[::1], f4[::1], u1[::1], i4[::1], i4[::1], f4, f4, f4, i8[::1], f4[::1])",
    nogil=True,
)
def edit_row(
    logits_V,
    bias_ids,
    bias,
    prompt_V,
    count_V,
    path_D,
    repetition,
    presence,
    frequency,
    masked_ids,
    edited_V,
):
    """Write one row with bias, penalties and mask to `edited_V`.

    prompt_V: 1 where the prompt holds the token. count_V: its occurrences in the committed output
    (both empty: no penalties). path_D: draft tokens after the committed output, padded with -1;
    they count for this row only. masked_ids: tokens set to -inf.
    """
    edited_V[:] = logits_V
    for i in range(bias_ids.shape[0]):
        edited_V[bias_ids[i]] += bias[i]
    if count_V.shape[0] > 0:
        for token in path_D:
            if token >= 0:
                count_V[token] += 1
        for v in range(edited_V.shape[0]):
            count = count_V[v]
            x = edited_V[v]
            if count > 0 or prompt_V[v] != 0:
                x = x / repetition if x > F32_0 else x * repetition
            if count > 0:
                x = x - (frequency * np.float32(count) + presence)
            edited_V[v] = x
        for token in path_D:
            if token >= 0:
                count_V[token] -= 1
    for i in range(masked_ids.shape[0]):
        edited_V[masked_ids[i]] = np.float32(-np.inf)


@kernel("(f4[::1], i4[::1])", nogil=True)
def mask_row(edited_V, mask_W):
    """Set the logits of tokens whose bit is 0 to -inf: bit t % 32 of int32 word t // 32."""
    for v in range(edited_V.shape[0]):
        if (mask_W[v >> 5] >> (v & 31)) & 1 == 0:
            edited_V[v] = np.float32(-np.inf)
