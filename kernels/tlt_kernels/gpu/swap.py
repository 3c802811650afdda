"""Two tensors of a GPU change contents, each read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_BYTES = 8192  # of each of the two, by a program
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by width: what is moved is bits, NaNs and all


@triton.jit
def _swap(one, other, count, BLOCK: tl.constexpr):
    i_E = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    one_E, other_E = tl.load(one + i_E, i_E < count), tl.load(other + i_E, i_E < count)
    tl.store(one + i_E, other_E, i_E < count)
    tl.store(other + i_E, one_E, i_E < count)


def swap(one: Tensor, other: Tensor) -> None:
    """Contiguous, of one shape and type, and apart; on the current stream."""
    assert one.shape == other.shape and one.dtype == other.dtype and one.is_contiguous() and other.is_contiguous()
    if one.numel():
        bits, block = _BITS[one.element_size()], _BLOCK_BYTES // one.element_size()
        _swap[(triton.cdiv(one.numel(), block),)](one.view(bits), other.view(bits), one.numel(), BLOCK=block)
