"""exp in float32 that vectorises: the host's libm is neither vectorised nor the same everywhere.

It uses range reduction to |r| <= ln2 / 2, a degree-6 polynomial, and an exponent built from bits.
The result is within 2 ulp of exp between -87 and 88, and clamped outside. NaN stays NaN. The
attention and activation kernels call it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import float32, int32, njit
from numba.extending import intrinsic

LOWEST = np.float32(-87.0)  # exp(-87) is the last normal power of two above the denormals
HIGHEST = np.float32(88.0)
_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH = np.float32(0.693359375)  # nine bits: n * _LN2_HIGH is exact for |n| < 2^15
_LN2_LOW = np.float32(-2.12194440e-4)
_C2, _C3, _C4, _C5, _C6 = (np.float32(c) for c in (0.5, 1 / 6, 1 / 24, 1 / 120, 1 / 720))
_HALF, _ONE = np.float32(0.5), np.float32(1.0)


def _bitcast(typing_context, bits):
    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return float32(int32), generate


float_from_bits: Any = intrinsic(_bitcast)


@njit(cache=True, fastmath={"contract"}, error_model="numpy", inline="always")
def exp(x):
    """Return exp(x), float32 to float32."""
    x = LOWEST if x < LOWEST else x  # comparisons in this order let NaN through
    x = HIGHEST if x > HIGHEST else x
    n = np.floor(x * _LOG2_E + _HALF)
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    polynomial = _ONE + r * (_ONE + r * (_C2 + r * (_C3 + r * (_C4 + r * (_C5 + r * _C6)))))
    return polynomial * float_from_bits(int32((int32(n) + int32(127)) << int32(23)))
