"""Two tensors of a GPU change contents, each read and written once.

One kernel per width of an element, and one for addresses that vector accesses cannot take: whatever the sizes, no pair of tensors asks
for another, so `variant` tells what has to be compiled before the first commit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_BYTES = 8192  # of each of the two, by a program
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by width: what is moved is bits, NaNs and all
_ALIGNED = 16  # bytes of a vector access
_MOST = 1 << 30  # elements of a launch: their number is an int32


def _swap(one, other, count, BLOCK: tl.constexpr):
    start = tl.program_id(0) * BLOCK
    i_E = start + tl.arange(0, BLOCK)
    if start + BLOCK <= count:  # no mask, which would have to be of whole vectors
        one_E, other_E = tl.load(one + i_E), tl.load(other + i_E)
        tl.store(one + i_E, other_E)
        tl.store(other + i_E, one_E)
    else:
        one_E, other_E = tl.load(one + i_E, i_E < count), tl.load(other + i_E, i_E < count)
        tl.store(one + i_E, other_E, i_E < count)
        tl.store(other + i_E, one_E, i_E < count)


_KERNELS = {
    True: triton.jit(_swap, do_not_specialize=["count"]),
    False: triton.jit(_swap, do_not_specialize=["count"], do_not_specialize_on_alignment=["one", "other"]),
}


def variant(one: Tensor, other: Tensor) -> tuple[int, bool]:
    """Which kernel serves them: bytes of an element, and whether both begin where vectors may."""
    return one.element_size(), not (one.data_ptr() | other.data_ptr()) % _ALIGNED


def swap(one: Tensor, other: Tensor) -> None:
    """Contiguous, of one shape and type, and apart; on the current stream."""
    assert one.shape == other.shape and one.dtype == other.dtype and one.is_contiguous() and other.is_contiguous()
    width, aligned = variant(one, other)
    block = _BLOCK_BYTES // width
    for mine, theirs in zip(*(tensor.view(-1).view(_BITS[width]).split(_MOST) for tensor in (one, other)), strict=True):
        if mine.numel():
            _KERNELS[aligned][(triton.cdiv(mine.numel(), block),)](mine, theirs, mine.numel(), BLOCK=block)
