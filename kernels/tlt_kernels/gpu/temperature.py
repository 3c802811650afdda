"""z = logits / T on the GPU, with the same bits in every kernel.

The quotient is a product with 1/T and one correction by explicit fused multiply-adds. That is the
rounded quotient except for rare last bits, at a third of the cost of a division, and exact at T =
1. A temperature below `GREEDY_BELOW` is greedy: z = logits, no noise, no filters.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tlt_kernels.gpu.target import INTERPRETED

GREEDY_BELOW = tl.constexpr(1e-5)


@triton.jit
def divided(logits, temperature):
    """Return logits / temperature. Infinities and NaN pass through."""
    if INTERPRETED:  # its multiply-add rounds twice
        return logits / temperature
    inverse = tl.div_rn(1.0, temperature)
    quotient = logits * inverse
    corrected = tl.fma(tl.fma(0.0 - quotient, temperature, logits), inverse, quotient)
    return tl.where(corrected == corrected, corrected, quotient)


@triton.jit
def scale_of(temperature):
    """Return the temperature to divide by: 1 for a greedy row."""
    return tl.where(temperature < GREEDY_BELOW, 1.0, temperature)
