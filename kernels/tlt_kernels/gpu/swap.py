"""Swaps the contents of pairs of GPU tensors; each tensor is read and written once.

There is one kernel per element width, and one for addresses without vector alignment. A pair of any
size uses one of these, so `variant` names the kernels to compile before the first commit.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from tlt_kernels.gpu.target import PDL, pdl_launch, pdl_wait

# Bytes of each tensor per program, by alignment: without it, an access moves a single element.
_BLOCK_BYTES = {True: 16384, False: 2048}
# Types by width: the kernels move bits, so a NaN keeps its payload.
_BITS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_ALIGNED = 16  # bytes of a vector access


@triton.jit
def _swap(one, other, count, first, last, BLOCK: tl.constexpr):
    if first != 0:
        pdl_wait()
    if last == 0:
        pdl_launch()
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i_E = start + tl.arange(0, BLOCK)
    if start + BLOCK <= count:  # no mask, because a mask would have to cover whole vectors
        one_E, other_E = tl.load(one + i_E), tl.load(other + i_E)
        tl.store(one + i_E, other_E)
        tl.store(other + i_E, one_E)
    else:
        one_E, other_E = tl.load(one + i_E, i_E < count), tl.load(other + i_E, i_E < count)
        tl.store(one + i_E, other_E, i_E < count)
        tl.store(other + i_E, one_E, i_E < count)
    pdl_wait()


@triton.jit(do_not_specialize=["count", "first", "last"])
def _swap_vectors(one, other, count: tl.int64, first, last, BLOCK: tl.constexpr):
    _swap(one, other, count, first, last, BLOCK)


@triton.jit(
    do_not_specialize=["count", "first", "last"], do_not_specialize_on_alignment=["one", "other"]
)
def _swap_elements(one, other, count: tl.int64, first, last, BLOCK: tl.constexpr):
    _swap(one, other, count, first, last, BLOCK)


_KERNELS = {True: _swap_vectors, False: _swap_elements}  # by whether both tensors are aligned


def variant(one: Tensor, other: Tensor) -> tuple[int, bool]:
    """Return the kernel for the pair: bytes of an element, and whether both tensors have vector
    alignment.
    """
    return one.element_size(), not (one.data_ptr() | other.data_ptr()) % _ALIGNED


def swap(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Swap the contents of each pair. The tensors of a pair are contiguous, of one shape and dtype;
    no two tensors share memory.

    The launches run on the current stream: the first pair waits for earlier work, the other pairs
    run together with it, and later work starts when all pairs are done.
    """
    for one, other in pairs:
        assert (
            one.shape == other.shape
            and one.dtype == other.dtype
            and one.is_contiguous()
            and other.is_contiguous()
        )
    filled = [pair for pair in pairs if pair[0].numel()]
    for i, (one, other) in enumerate(filled):
        width, aligned = variant(one, other)
        block, count = _BLOCK_BYTES[aligned] // width, one.numel()
        one_E, other_E = (triton.reinterpret(tensor, _BITS[width]) for tensor in (one, other))
        ends = int(i == 0), int(i == len(filled) - 1)
        _KERNELS[aligned][(triton.cdiv(count, block),)](
            one_E, other_E, count, *ends, BLOCK=block, **PDL
        )
