"""The order of nodes in the choice of rows: by acceptance probability in steps, so that a key of 31
bits also contains the node. Legend: N nodes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LEAST = tl.constexpr(0x37800000)  # bits of 2^-16, below which all probabilities are equal


@triton.jit
def priority(acceptance, order):
    """Return positive int32 keys, all different, larger = better: 11 bits per octave of acceptance
    probability down to 2^-16, then the lower order first.
    """
    octaves = (acceptance.to(tl.int32, bitcast=True) - _LEAST) >> 12
    key = (tl.minimum(tl.maximum(octaves, 0), 32766) << 16) | (65535 - order)
    return tl.where(acceptance > 0.0, key, -1)


def compared(acceptance_N: Tensor) -> Tensor:
    """Return acceptance probabilities as coarse as `priority` compares them, float32 [N]: ties
    there are ties here.
    """
    steps_N = (
        (acceptance_N.view(torch.int32) - _LEAST.value).bitwise_right_shift(12).clamp(0, 32766)
    )
    coarse_N = ((steps_N << 12) + _LEAST.value).view(torch.float32)
    return torch.where(acceptance_N > 0.0, coarse_N, acceptance_N)
