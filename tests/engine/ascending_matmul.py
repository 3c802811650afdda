"""A matmul for Triton's interpreter in which an element's bits depend on its row and column alone.
Numpy leaves it to BLAS, which adds in other orders at the edges of its blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit


@njit(cache=True)
def _matmul(a_MK, b_KN, acc_MN):
    """Return acc + a @ b. Products are rounded, and added in ascending order of k."""
    sum_MN = np.zeros((a_MK.shape[0], b_KN.shape[1]), np.float32)
    for m in range(a_MK.shape[0]):
        for k in range(a_MK.shape[1]):
            for n in range(b_KN.shape[1]):
                sum_MN[m, n] += a_MK[m, k] * b_KN[k, n]
    return acc_MN + sum_MN


def ascending(slow: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `create_dot` for matrices of float32, which leaves all others to `slow`."""

    def create_dot(builder: Any, a: Any, b: Any, acc: Any, *rules: Any) -> Any:
        operands = [np.ascontiguousarray(each.data) for each in (a, b, acc)]
        if any(each.dtype != np.float32 or each.ndim != 2 for each in operands):
            return slow(builder, a, b, acc, *rules)
        return type(acc)(_matmul(*operands), acc.dtype.scalar)

    return create_dot
