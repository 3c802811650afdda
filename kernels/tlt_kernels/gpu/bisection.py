"""Finds the shortest head of a row, sorted by descending z and ascending id, with a given mass or
count: by bisection over the values of z, without a sort, of a list of tokens or of the whole row.
The first tile stays in registers, so a short list is read once.

Legend: V vocabulary, L listed tokens, T tokens of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tlt_kernels.gpu.noise import fast_exp
from tlt_kernels.gpu.nucleus import ONE
from tlt_kernels.gpu.ordering import key_of, value_of
from tlt_kernels.gpu.temperature import divided

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
