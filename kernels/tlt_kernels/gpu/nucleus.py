"""The cut of top_p in a row: a bracket in nearly even rows, which may keep more tokens than can be
listed, and bisection.

For the bracket, a sample of the row estimates the cut. Thresholds are placed around it, and many
programs weigh the tokens at or above each of them, exactly. So the cut is known to lie between two
thresholds, and only the tokens between these are left. The sample decides the number of these
tokens, never which tokens are kept. Masses are integers, so neither the order of tokens nor that of
programs matters.

Bisection over the values of z finds the shortest head of a row, sorted by descending z and
ascending id, with a given mass or count, without a sort: of a list of tokens or of the whole row.
The first tile stays in registers, so a short list is read once.

Legend: S sampled rows, V vocabulary, N thresholds, M sampled tokens of a row, L listed tokens, T
tokens of a tile, E the two ends of the bracket.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tlt_kernels.gpu.noise import fast_exp
from tlt_kernels.gpu.ordering import key_of, value_of
from tlt_kernels.gpu.target import pdl_launch, pdl_wait
from tlt_kernels.gpu.temperature import divided

THRESHOLDS = 4
SAMPLED = 8192
# Tokens per program, and at once: few programs, as most steps have nothing to weigh.
WEIGHED, TILE = 16384, 2048
WEIGH_WARPS = 4
HALVINGS = tl.constexpr(16)
DEVIATIONS = tl.constexpr(4.0)  # from the sample's estimate to the outer thresholds
ONE = tl.constexpr(2.0**40)  # mass of the likeliest token


@triton.jit
def place_thresholds(
    logits_V, temperature, top, floor, leftover, V, N: tl.constexpr, SAMPLED: tl.constexpr
):
    """Return N rising thresholds, not below the floor, around the z below which a row's tokens
    weigh `leftover`, as exp(z - top).
    """
    stride = tl.cdiv(V, SAMPLED)
    sampled = tl.arange(0, SAMPLED)
    token_M = sampled * stride + sampled % stride
    z_M = divided(tl.load(logits_V + token_M, mask=token_M < V, other=-float("inf")), temperature)
    bottom = tl.maximum(tl.min(tl.where(z_M > -float("inf"), z_M, top)), floor)
    z_1M, mass_1M = z_M[None, :], fast_exp(z_M - top)[None, :]
    sought = leftover / stride
    ends = tl.arange(0, 2)
    below_E, above_E = tl.zeros((2,), tl.float32) + bottom, tl.zeros((2,), tl.float32) + top
    for _ in range(HALVINGS):
        middle_E = 0.5 * (below_E + above_E)
        mass_E = tl.sum(tl.where(z_1M < middle_E[:, None], mass_1M, 0.0), axis=1)
        # No sampled token below weighs more than exp(middle - top), which bounds the variance.
        error_E = DEVIATIONS * tl.sqrt(sought * fast_exp(middle_E - top))
        under_E = mass_E + tl.where(ends == 0, error_E, 0.0 - error_E) <= sought
        below_E = tl.where(under_E, middle_E, below_E)
        above_E = tl.where(under_E, above_E, middle_E)
    low, high = tl.min(below_E), tl.max(above_E)
    return low + (high - low) * (tl.arange(0, N).to(tl.float32) / (N - 1))


@triton.jit
def weigh(
    logits_SV, narrowed_S, top_S, temperature_S, threshold_SN, mass_SN, V,
    N: tl.constexpr, WEIGHED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Weigh a piece of a row: its tokens at or above each threshold."""
    pdl_launch()
    s = tl.program_id(1).to(tl.int64)
    at_N = s * N + tl.arange(0, N)
    first = tl.program_id(0) * WEIGHED
    pdl_wait()
    if tl.load(narrowed_S + s) == 0:
        return
    top, temperature = tl.load(top_S + s), tl.load(temperature_S + s)
    threshold_N1 = tl.load(threshold_SN + at_N)[:, None]
    mass_N = tl.zeros((N,), tl.int64)
    for start in range(first, tl.minimum(first + WEIGHED, V), TILE):
        token_T = start + tl.arange(0, TILE)
        z_T = divided(
            tl.load(logits_SV + s * V + token_T, mask=token_T < V, other=-float("inf")), temperature
        )
        mass_T = (fast_exp(z_T - top) * ONE).to(tl.int64)
        mass_N += tl.sum(tl.where(z_T[None, :] >= threshold_N1, mass_T[None, :], 0), axis=1)
    tl.atomic_add(mass_SN + at_N, mass_N, sem="relaxed")


@triton.jit
def bracket(threshold_SN, mass_SN, floor, target, s, N: tl.constexpr):
    """Return (low, high, mass of the tokens at or above high): the head of row s with the target's
    mass ends at some z of low <= z < high, where floor <= low.
    """
    at_N = s * N + tl.arange(0, N)
    threshold_N, mass_N = tl.load(threshold_SN + at_N), tl.load(mass_SN + at_N)
    reached_N = mass_N >= target
    low = tl.max(tl.where(reached_N, threshold_N, floor))
    high = tl.min(tl.where(reached_N, float("inf"), threshold_N))
    return low, high, tl.max(tl.where(reached_N, 0, mass_N))


ABSENT = tl.constexpr(-(2**31))  # below every key


@triton.jit
def tile_of(logits_V, z_L, token_L, size, listed, temperature, top, start, TILE: tl.constexpr):
    """Return (keys, tokens, masses) of a tile of the list or of the row."""
    lanes = start + tl.arange(0, TILE)
    if listed:
        z_T = tl.load(z_L + lanes, mask=lanes < size, other=-float("inf"))
        token_T = tl.load(token_L + lanes, mask=lanes < size, other=0)
    else:
        z_T = divided(
            tl.load(logits_V + lanes, mask=lanes < size, other=-float("inf")), temperature
        )
        token_T = lanes
    key_T = tl.where(lanes < size, key_of(z_T), ABSENT)
    return key_T, token_T, (fast_exp(z_T - top) * ONE).to(tl.int64)


@triton.jit
def measured(
    key_T, token_T, mass_T,  # the first tile
    logits_V, z_L, token_L, size, listed, temperature, top, key, last,
    MASS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return (count, mass) of the tokens whose key is larger, or equal with an id up to `last`.
    Without MASS the count stands for the mass.
    """
    kept_T = (key_T > key) | ((key_T == key) & (token_T <= last))
    count_T = kept_T.to(tl.int32)
    if MASS:
        sum_T = tl.where(kept_T, mass_T, 0)
    for start in range(TILE, size, TILE):
        next_key_T, next_token_T, next_mass_T = tile_of(
            logits_V, z_L, token_L, size, listed, temperature, top, start, TILE
        )
        kept_T = (next_key_T > key) | ((next_key_T == key) & (next_token_T <= last))
        count_T += kept_T.to(tl.int32)
        if MASS:
            sum_T += tl.where(kept_T, next_mass_T, 0)
    count = tl.sum(count_T)
    return count, tl.sum(sum_T) if MASS else count.to(tl.int64)


@triton.jit
def shorten(
    key_T, token_T, mass_T,
    logits_V, z_L, token_L, size, listed, temperature, top, low_key, low_last, high_key, target, V,
    MASS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return (key, last) of the shortest head that reaches `target`. The head that ends at
    (low_key, low_last) is known to reach it, the keys from high_key on are known not to.
    """
    low, high = low_key, high_key
    count_low = measured(
        key_T, token_T, mass_T, logits_V, z_L, token_L, size, listed, temperature, top,
        low, low_last, False, TILE,
    )[0]  # fmt: skip
    count_high = measured(
        key_T, token_T, mass_T, logits_V, z_L, token_L, size, listed, temperature, top,
        high - 1, -1, False, TILE,
    )[0]  # fmt: skip
    halve_keys = False
    while (count_low - count_high > 1) & (high - 1 > low):
        middle = key_of(
            0.5 * (value_of(low) + value_of(high))
        )  # tokens are spread more evenly over values than over keys
        if halve_keys | (middle <= low) | (middle >= high):
            middle = ((low.to(tl.int64) + high) >> 1).to(tl.int32)
        halve_keys = not halve_keys
        count, mass = measured(
            key_T, token_T, mass_T, logits_V, z_L, token_L, size, listed, temperature, top,
            middle, V, MASS, TILE,
        )  # fmt: skip
        if mass >= target:
            low, count_low = middle, count
        else:
            high, count_high = middle, count
    last = tl.where(low == low_key, low_last, V)
    if count_low - count_high > 1:  # ties
        before = tl.full((), -1, tl.int32)
        last = tl.minimum(last, V - 1)
        while last - before > 1:
            middle = (before + last) >> 1
            head = measured(
                key_T, token_T, mass_T, logits_V, z_L, token_L, size, listed, temperature, top,
                low, middle, MASS, TILE,
            )[1]  # fmt: skip
            if head >= target:
                last = middle
            else:
                before = middle
    return low, last
