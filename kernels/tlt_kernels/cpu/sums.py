"""The sum of mixed elements that names a tensor's content, on the CPU; `tlt_client.channels.sums` says how it is defined."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

_GOLDEN, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)


@njit(cache=True, nogil=True)
def _sum(word_N, shift):
    total, step = np.uint64(0), np.uint64(0)
    for i in range(len(word_N)):
        step += _GOLDEN
        z = (np.uint64(word_N[i]) << shift) + step
        z = (z ^ (z >> _30)) * _FIRST
        z = (z ^ (z >> _27)) * _SECOND
        total += z ^ (z >> _31)
    return total


def mixed_sum(values: Tensor) -> int:
    """Modulo 2^64. A contiguous CPU tensor of floating point or integers; releases the GIL."""
    values = values.detach()
    if values.dtype == torch.bfloat16:
        return int(_sum(values.reshape(-1).view(torch.int16).numpy().view(np.uint16), np.uint64(16)))
    if values.is_floating_point():
        return int(_sum(values.reshape(-1).float().numpy().view(np.uint32), np.uint64(0)))
    return int(_sum(values.reshape(-1).long().numpy().view(np.uint64), np.uint64(0)))
