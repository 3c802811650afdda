"""Weighed bins of nearly even rows. Many programs weigh a row's tokens in bins of z, twice, so that
only a few tokens are left to `filters.py`: those of the part of the bin that top_p's cut crosses.

Bins never fall as z rises, for any rounding, so they are consecutive pieces of the sorted row.
Their widths are powers of two, so every kernel computes the same ones. Masses are integers, so
neither the order of tokens nor that of programs matters.

Legend: S sampled rows, V vocabulary, N bins, T tokens of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tlt_kernels.gpu.noise import fast_exp
from tlt_kernels.gpu.target import pdl_launch, pdl_wait
from tlt_kernels.gpu.temperature import divided

BINS = 32
# Tokens per program, and at once: few programs, as most steps have nothing to weigh.
WEIGHED, TILE = 8192, 128
WEIGH_WARPS = 4
ONE = tl.constexpr(2.0**40)  # mass of the likeliest token


@triton.jit
def scale_for(width, N: tl.constexpr):
    """Return a power of two: N bins of one over it are wider than `width`, at most twice."""
    bounded = tl.minimum(tl.maximum(width / N, 2.0**-60), 2.0**60)
    exponent = (bounded.to(tl.int32, bitcast=True) >> 23) + 1
    return ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def bin_of(z, low, scale, N: tl.constexpr):
    return tl.minimum(tl.maximum((z - low) * scale, 0.0), N - 1.0).to(tl.int32)


@triton.jit
def _start_of(crossed, low, scale):
    """Return where a bin starts. The rounded quotient is exact, and no multiply-add can absorb it,
    so every kernel finds the same bits.
    """
    return low + tl.div_rn(crossed.to(tl.float32), scale)


@triton.jit
def _crossed(mass_N, target, N: tl.constexpr):
    """Return (the bin in which the mass from the top reaches the target, the mass above it): bin 0
    if none does.
    """
    bins = tl.arange(0, N)
    above_N = tl.sum(mass_N) - tl.cumsum(mass_N, axis=0)
    crossed = tl.min(tl.where(above_N < target, bins, N - 1))
    return crossed, tl.sum(tl.where(bins > crossed, mass_N, 0))


@triton.jit
def crossing(mass_SN, part_SN, target_S, low_S, scale_S, s, N: tl.constexpr):
    """Return where the weighings of row s found the cut: (bin, its start, the part of it, the mass
    above that part).
    """
    bins = tl.arange(0, N)
    target = tl.load(target_S + s)
    crossed, above = _crossed(tl.load(mass_SN + s * N + bins), target, N)
    part, above_part = _crossed(tl.load(part_SN + s * N + bins), target - above, N)
    start = _start_of(crossed, tl.load(low_S + s), tl.load(scale_S + s))
    return crossed, start, part, above + above_part


@triton.jit
def within(z, low, scale, crossed, start, part, N: tl.constexpr):
    """Tell which tokens belong to the part of the bin."""
    return (bin_of(z, low, scale, N) == crossed) & (bin_of(z, start, scale * N, N) == part)


@triton.jit
def weigh_bins(
    logits_SV, narrowed_S, floor_S, low_S, scale_S, top_S, target_S, temperature_S,
    mass_SN, part_SN, V,
    PARTS: tl.constexpr, N: tl.constexpr, WEIGHED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Weigh a piece of a row's tokens by bin; with PARTS, those of the bin that the cut crosses, by
    parts of it.
    """
    pdl_launch()
    s = tl.program_id(1).to(tl.int64)
    bins = tl.arange(0, N)
    first = tl.program_id(0) * WEIGHED
    pdl_wait()
    if tl.load(narrowed_S + s) == 0:
        return
    floor, low, scale = tl.load(floor_S + s), tl.load(low_S + s), tl.load(scale_S + s)
    top, temperature = tl.load(top_S + s), tl.load(temperature_S + s)
    if PARTS:
        crossed, _ = _crossed(tl.load(mass_SN + s * N + bins), tl.load(target_S + s), N)
        start = _start_of(crossed, low, scale)
    mass_NT = tl.zeros((N, TILE), tl.int64)
    for at in range(first, tl.minimum(first + WEIGHED, V), TILE):
        tokens = at + tl.arange(0, TILE)
        z_T = divided(
            tl.load(logits_SV + s * V + tokens, mask=tokens < V, other=-float("inf")), temperature
        )
        weighed_T = (tokens < V) & (z_T >= floor)
        bin_T = bin_of(z_T, low, scale, N)
        if PARTS:
            weighed_T = weighed_T & (bin_T == crossed)
            bin_T = bin_of(z_T, start, scale * N, N)
        mass_T = tl.where(weighed_T, fast_exp(z_T - top) * ONE, 0.0).to(tl.int64)
        mass_NT += tl.where(bin_T[None, :] == bins[:, None], mass_T[None, :], 0)
    mass_N = tl.sum(mass_NT, axis=1)
    if PARTS:
        tl.atomic_add(part_SN + s * N + bins, mass_N, sem="relaxed")
    else:
        tl.atomic_add(mass_SN + s * N + bins, mass_N, sem="relaxed")
