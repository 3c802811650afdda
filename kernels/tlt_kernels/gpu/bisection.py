"""The shortest head of a row, sorted by falling z and rising id, that has a given mass or count: by
bisection over the values of z, without a sort, of a list of tokens or of the whole row.

Legend: V vocabulary, L listed tokens, T tokens of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tlt_kernels.gpu.noise import fast_exp
from tlt_kernels.gpu.nucleus import ONE
from tlt_kernels.gpu.ordering import key_of, value_of
from tlt_kernels.gpu.temperature import divided


@triton.jit
def measured(
    logits_V,
    z_L,
    token_L,
    size,
    listed,
    temperature,
    top,
    key,
    last,
    MASS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return (count, mass) of the tokens whose key is larger, or equal with an id up to `last`.
    Without MASS the count stands for the mass.
    """
    count = tl.zeros((TILE,), tl.int32)
    mass = tl.zeros((TILE,), tl.int64)
    for start in range(0, size, TILE):
        lanes = start + tl.arange(0, TILE)
        if listed:
            z = tl.load(z_L + lanes, mask=lanes < size, other=-float("inf"))
            tokens = tl.load(token_L + lanes, mask=lanes < size, other=0)
        else:
            z = divided(
                tl.load(logits_V + lanes, mask=lanes < size, other=-float("inf")), temperature
            )
            tokens = lanes
        keys = key_of(z)
        kept = (lanes < size) & ((keys > key) | ((keys == key) & (tokens <= last)))
        count += kept.to(tl.int32)
        if MASS:
            mass += tl.where(kept, fast_exp(z - top) * ONE, 0.0).to(tl.int64)
    number = tl.sum(count)
    return number, tl.sum(mass) if MASS else number.to(tl.int64)


@triton.jit
def shorten(
    logits_V,
    z_L,
    token_L,
    size,
    listed,
    temperature,
    top,
    low_key,
    low_last,
    target,
    V,
    MASS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return (key, last) of the shortest head that measures `target`. The head that ends at
    (low_key, low_last) is known to measure it.
    """
    low, high = low_key, key_of(top) + 1
    count_low = measured(
        logits_V, z_L, token_L, size, listed, temperature, top, low, low_last, False, TILE
    )[0]
    count_high = tl.zeros_like(count_low)
    halve_keys = False
    while (count_low - count_high > 1) & (high - 1 > low):
        middle = key_of(
            0.5 * (value_of(low) + value_of(high))
        )  # tokens are spread more evenly over values than over keys
        if halve_keys | (middle <= low) | (middle >= high):
            middle = ((low.to(tl.int64) + high) >> 1).to(tl.int32)
        halve_keys = not halve_keys
        count, mass = measured(
            logits_V, z_L, token_L, size, listed, temperature, top, middle, V, MASS, TILE
        )
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
                logits_V, z_L, token_L, size, listed, temperature, top, low, middle, MASS, TILE
            )[1]
            if head >= target:
                last = middle
            else:
                before = middle
    return low, last


@triton.jit
def least(z_L, size, key, TILE: tl.constexpr):
    """Return the least key of the listed tokens; `key` if there are none."""
    least_T = tl.full((TILE,), 0x7FFFFFFF, tl.int32)
    for start in range(0, size, TILE):
        lanes = start + tl.arange(0, TILE)
        z_T = tl.load(z_L + lanes, mask=lanes < size, other=float("inf"))
        least_T = tl.minimum(least_T, key_of(z_T))
    return tl.where(size > 0, tl.min(least_T), key)
