"""Keyed Gumbel noise on the GPU: the Philox words of `tlt_kernels.cpu.noise` bit for bit, G =
-log(-log1p(-u)) in float32.

These are device functions, inlined by every kernel that compares noisy logits. Both logarithms are
one polynomial of explicit fused multiply-adds, so that no compiler may round them differently in
another kernel: G has the same bits in every kernel on one machine. Its error against float64 is a
few units in the last place of max(|G|, 1), also for the smallest words: u and 1 - u are each made
from the integer, never from each other. Source: Salmon et al., "Parallel random numbers: as easy as
1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tlt_kernels.gpu.target import INTERPRETED

MULTIPLY_0 = tl.constexpr(0xD2511F53)
MULTIPLY_1 = tl.constexpr(0xCD9E8D57)
WEYL_0 = tl.constexpr(0x9E3779B9)
WEYL_1 = tl.constexpr(0xBB67AE85)
ROUNDS = tl.constexpr(10)
THIRD = tl.constexpr(0x55555555)  # words below it have u <= 1/3
STEP = tl.constexpr(2.0**-32)  # distance between two uniforms
V_MIN = tl.constexpr(2.0**-24)  # bound of 1 - u, bounds G from below, at about -2.81
TWO_THIRDS_BITS = tl.constexpr(0x3F2AAAAB)
EXPONENT_MASK = tl.constexpr(-0x800000)
LN2_STEP = tl.constexpr(0.6931471805599453 * 2.0**-23)  # ln 2 for exponents at bit 23
# log1p(f) = f + f^2 P(f) on [-1/3, 1/3], minimax in relative error: 4.5e-9 before rounding.
P0, P1, P2 = (
    tl.constexpr(-0.5),
    tl.constexpr(0.3333320915699005),
    tl.constexpr(-0.24999716877937317),
)
P3, P4, P5 = (
    tl.constexpr(0.20010748505592346),
    tl.constexpr(-0.16682305932044983),
    tl.constexpr(0.14001156389713287),
)
P6, P7, P8 = (
    tl.constexpr(-0.12167149782180786),
    tl.constexpr(0.14004777371883392),
    tl.constexpr(-0.12948985397815704),
)


@triton.jit
def philox4x32(key_0, key_1, counter_0, counter_1):
    """Return the four uint32 words of Philox-4x32-10 at counters (counter_0, counter_1, 0, 0)."""
    x0 = counter_0
    x1 = tl.zeros_like(counter_0) + counter_1
    x2 = tl.zeros_like(counter_0)
    x3 = tl.zeros_like(counter_0)
    for _ in tl.static_range(ROUNDS):
        high_0, low_0 = tl.umulhi(x0, MULTIPLY_0), x0 * MULTIPLY_0
        high_1, low_1 = tl.umulhi(x2, MULTIPLY_1), x2 * MULTIPLY_1
        x0, x1, x2, x3 = high_1 ^ x1 ^ key_0, low_1, high_0 ^ x3 ^ key_1, low_0
        key_0 = key_0 + WEYL_0
        key_1 = key_1 + WEYL_1
    return x0, x1, x2, x3


@triton.jit
def log_of_parts(exponent, fraction):
    """Return exponent * 2^-23 * ln 2 + log1p(fraction) for |fraction| <= 1/3."""
    p = tl.fma(fraction, P8, P7)
    p = tl.fma(p, fraction, P6)
    p = tl.fma(p, fraction, P5)
    p = tl.fma(p, fraction, P4)
    p = tl.fma(p, fraction, P3)
    p = tl.fma(p, fraction, P2)
    p = tl.fma(p, fraction, P1)
    p = tl.fma(p, fraction, P0)
    log1p = tl.fma(fraction * fraction, p, fraction)
    return tl.fma(exponent.to(tl.float32), LN2_STEP, log1p)


@triton.jit
def parts(x):
    """Return (exponent << 23, fraction) with x = 2^exponent * (1 + fraction) and fraction in [-1/3,
    1/3], for a normal float32 x > 0.
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - TWO_THIRDS_BITS) & EXPONENT_MASK
    return exponent, (bits - exponent).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def log(x):
    """Return log x of a normal float32 x > 0 to about one unit in the last place."""
    exponent, fraction = parts(x)
    return log_of_parts(exponent, fraction)


@triton.jit
def gumbel_of_word(word):
    """Return G of Philox words."""
    small = word < THIRD
    distance = tl.fma(
        tl.where(small, word, word ^ 0xFFFFFFFF).to(tl.float32), STEP, 0.5 * STEP
    )  # u if it is small, else 1 - u
    exponent, fraction = parts(tl.maximum(distance, V_MIN))
    exponent = tl.where(small, 0, exponent)
    fraction = tl.where(small, 0.0 - distance, fraction)
    return 0.0 - log(0.0 - log_of_parts(exponent, fraction))


@triton.jit
def fast_log2(x):
    """Return log2 of normal float32 x > 0 in one instruction, with an absolute error up to 1e-5."""
    if INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def fast_exp(x):
    """Return exp(x) to 2e-7 and the rounding of x; 0 below the normal range."""
    if INTERPRETED:
        return tl.exp(x)
    scaled = x * 1.4426950408889634
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [scaled], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def split_seed(seed):
    """Return (key_0, key_1): the low and the high half of a 64-bit seed."""
    return seed.to(tl.uint32), (seed >> 32).to(tl.uint32)


@triton.jit
def words_of_quads(seed, first, position, N: tl.constexpr):
    """Return the Philox words of the 4 N tokens from `first`, a multiple of 4: the words of tokens
    first + 4 n, first + 4 n + 1, and so on.
    """
    key_0, key_1 = split_seed(seed)
    quads = ((first >> 2) + tl.arange(0, N)).to(tl.uint32)
    return philox4x32(key_0, key_1, quads, position.to(tl.uint32))


@triton.jit
def gumbel_above(word):
    """Return a cheap bound: G <= gumbel_above + 1e-4, and near it where G is large (-log1p(-u) >=
    u).
    """
    return fast_log2(tl.fma(word.to(tl.float32), STEP, 0.5 * STEP)) * -0.6931471805599453


@triton.jit
def gumbel_of_tokens(seed, token_N, position):
    """Return G of any tokens, with one Philox call each."""
    key_0, key_1 = split_seed(seed)
    w0, w1, w2, w3 = philox4x32(key_0, key_1, (token_N >> 2).to(tl.uint32), position.to(tl.uint32))
    lane = token_N & 3
    return gumbel_of_word(
        tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
    )
