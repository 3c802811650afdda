"""Keyed Gumbel noise: G(seed, token, position), a pure function with no state.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), Philox-4x32 with 10
rounds. The sampler and the drafter inline these device functions, so both see the same bits in any
batch: no fast-math, no fused multiply-add, scalar logarithms. G is computed in float64 from the
Philox word and rounded to float32 once. Slow twin: `tlt_kernels.reference`.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

MULTIPLY_0 = np.uint64(0xD2511F53)
MULTIPLY_1 = np.uint64(0xCD9E8D57)
WEYL_0 = np.uint32(0x9E3779B9)
WEYL_1 = np.uint32(0xBB67AE85)
ROUNDS = 10
LOW_32 = np.uint64(0xFFFFFFFF)
SHIFT_32 = np.uint64(32)
STEP = 2.0**-32  # distance between two uniforms
U_MAX = 1.0 - 2.0**-24  # bounds G from below, at about -2.81


@njit(cache=True, forceinline=True)
def philox4x32(k0, k1, c0, c1, c2=0, c3=0):
    """Return the four uint32 words of Philox-4x32-10 at key (k0, k1), counter (c0, c1, c2, c3).
    Arguments are taken modulo 2^32.
    """
    key_0, key_1 = np.uint32(k0), np.uint32(k1)
    x0, x1, x2, x3 = np.uint32(c0), np.uint32(c1), np.uint32(c2), np.uint32(c3)
    for _ in range(ROUNDS):
        product_0 = MULTIPLY_0 * np.uint64(x0)
        product_1 = MULTIPLY_1 * np.uint64(x2)
        x0 = np.uint32(np.uint32(product_1 >> SHIFT_32) ^ x1 ^ key_0)
        x1 = np.uint32(product_1)
        x2 = np.uint32(np.uint32(product_0 >> SHIFT_32) ^ x3 ^ key_1)
        x3 = np.uint32(product_0)
        key_0 = np.uint32(key_0 + WEYL_0)
        key_1 = np.uint32(key_1 + WEYL_1)
    return x0, x1, x2, x3


@njit(cache=True, forceinline=True)
def uniform(word):
    """Return the uniform in (0, 1) of one Philox word, float64 and exact."""
    return min((np.float64(word) + 0.5) * STEP, U_MAX)


@njit(cache=True, forceinline=True)
def gumbel_of_word(word):
    """Return G of one Philox word: -log(-log1p(-u)), float64 rounded to float32 once."""
    return np.float32(-math.log(-math.log1p(-uniform(word))))


@njit(cache=True, forceinline=True)
def split_seed(seed):
    """Return (k0, k1): the low and the high half of an unsigned 64-bit seed."""
    wide = np.uint64(seed)
    return np.uint32(wide & LOW_32), np.uint32(wide >> SHIFT_32)


@njit(cache=True)
def gumbel(seed, token, position):
    """Return G(seed, token, position) as float32: key = the seed's halves, counter = (token >> 2,
    position, 0, 0), word = token & 3.
    """
    k0, k1 = split_seed(seed)
    words = philox4x32(k0, k1, np.uint32(token >> 2), np.uint32(position))
    word = token & 3
    if word == 0:
        return gumbel_of_word(words[0])
    if word == 1:
        return gumbel_of_word(words[1])
    if word == 2:
        return gumbel_of_word(words[2])
    return gumbel_of_word(words[3])
