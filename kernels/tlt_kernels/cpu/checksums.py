"""The checksum of a tensor's content on the CPU: a sum of mixed elements, defined in
`tlt_client.channels.checksums`.

The same pass detects non-finite elements, because the content is read once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tlt_kernels.cpu.compiled import kernel

_GOLDEN, _FIRST, _SECOND = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)
# The exponent bits of a float32 are all ones in an infinity or a NaN.
_EXPONENT, _NONE = np.uint64(0x7F800000), np.uint64(0)


@kernel(
    "(u2[:, ::1], i8, i8, u8, u8)",
    "(u4[:, ::1], i8, i8, u8, u8)",
    "(u8[:, ::1], i8, i8, u8, u8)",
    "(u4[:, :], i8, i8, u8, u8)",
    nogil=True,
)
def _sum(word_RC, first, distance, shift, exponent):
    total, strange = np.uint64(0), False
    for r in range(word_RC.shape[0]):
        step = np.uint64(first + r * distance) * _GOLDEN
        for c in range(word_RC.shape[1]):
            step += _GOLDEN
            u = np.uint64(word_RC[r, c]) << shift
            strange |= (u & exponent) == _EXPONENT
            z = u + step
            z = (z ^ (z >> _30)) * _FIRST
            z = (z ^ (z >> _27)) * _SECOND
            total += z ^ (z >> _31)
    return total, not strange


def placed_sum(values_RC: Tensor, first: int, distance: int) -> tuple[int, bool]:
    """Return `mixed_sum` of a slice of a larger tensor. Its first element has the index `first`
    there, and its rows are `distance` elements apart. The sums of all slices add up, modulo 2^64,
    to the sum of the tensor. `values_RC`: floating point, in any layout.
    """
    word_RC = values_RC.detach().float().numpy().view(np.uint32)
    total, finite = _sum(word_RC, first, distance, np.uint64(0), _EXPONENT)
    return int(total), bool(finite)


def mixed_sum(values: Tensor) -> tuple[int, bool]:
    """Return the sum modulo 2^64, and whether all elements are finite. `values`: a contiguous CPU
    tensor of floats or integers. The call releases the GIL.
    """
    row = values.detach().reshape(-1)[None]
    if row.dtype == torch.bfloat16:
        word_RC, shift, exponent = row.view(torch.int16).numpy().view(np.uint16), 16, _EXPONENT
    elif row.is_floating_point():
        word_RC, shift, exponent = row.float().numpy().view(np.uint32), 0, _EXPONENT
    else:
        word_RC, shift, exponent = row.long().numpy().view(np.uint64), 0, _NONE
    total, finite = _sum(word_RC, 0, 0, np.uint64(shift), exponent)
    return int(total), bool(finite)


def mixed_sums(tensors: Sequence[Tensor]) -> list[tuple[int, bool]]:
    """Return `mixed_sum` of each tensor."""
    return [mixed_sum(tensor) for tensor in tensors]
