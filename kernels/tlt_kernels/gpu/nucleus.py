"""A bracket of top_p's cut in nearly even rows, which may keep more tokens than can be listed.

A sample of the row estimates the cut. Thresholds are placed around it, and many programs weigh the
tokens at or above each of them, exactly. So the cut is known to lie between two thresholds, and
only the tokens between these are left to `filters.py`. The sample decides the number of these
tokens, never which tokens are kept. Masses are integers, so neither the order of tokens nor that of
programs matters.

Legend: S sampled rows, V vocabulary, N thresholds, M sampled tokens of a row, T tokens of a tile, E
the two ends of the bracket.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tlt_kernels.gpu.noise import fast_exp
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
