"""The checksum of a tensor's content on a GPU: a sum of mixed elements, defined in
`tlt_client.channels.checksums`.

The same pass detects non-finite elements, because the content is read once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _BLOCKS = 2048, 16  # elements at once, blocks per program


@triton.jit(do_not_specialize=["columns", "placed_at", "distance"])
def _sum(
    values,
    found,
    count,
    columns,
    placed_at,
    distance,
    FLOAT: tl.constexpr,
    PLACED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Add up mixed elements. PLACED: rows of `columns` elements lie `distance` apart in a larger
    tensor, the first element at index `placed_at`.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK * BLOCKS
    sum_E, strange_E = tl.zeros([BLOCK], tl.uint64), tl.zeros([BLOCK], tl.int32)
    for block in range(BLOCKS):
        i_E = first + block * BLOCK + tl.arange(0, BLOCK)
        value_E = tl.load(values + i_E, i_E < count, other=0)
        if FLOAT:
            bits_E = value_E.to(tl.float32).to(tl.uint32, bitcast=True)
            strange_E |= ((bits_E & 0x7F800000) == 0x7F800000).to(tl.int32)
            z_E = bits_E.to(tl.uint64)
        else:
            z_E = value_E.to(tl.int64).to(tl.uint64, bitcast=True)
        at_E = i_E
        if PLACED:
            at_E = placed_at + i_E // columns * distance + i_E % columns
        z_E += (at_E + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
        z_E = (z_E ^ (z_E >> 30)) * 0xBF58476D1CE4E5B9
        z_E = (z_E ^ (z_E >> 27)) * 0x94D049BB133111EB
        sum_E += tl.where(i_E < count, z_E ^ (z_E >> 31), 0)
    tl.atomic_add(found, tl.sum(sum_E, axis=0).to(tl.int64, bitcast=True))
    if FLOAT:
        tl.atomic_add(found + 1, tl.sum(strange_E, axis=0).to(tl.int64))


def mixed_sum(values: Tensor) -> tuple[int, bool]:
    """Return the sum modulo 2^64, and whether all elements are finite. `values`: a contiguous GPU
    tensor of floats or integers. The call waits for the GPU.
    """
    return mixed_sums([values])[0]


def mixed_sums(tensors: Sequence[Tensor]) -> list[tuple[int, bool]]:
    """Return `mixed_sum` of each tensor, with one wait for their GPU."""
    if not tensors:
        return []
    found_N2 = torch.zeros(len(tensors), 2, dtype=torch.int64, device=tensors[0].device)
    for values, found in zip(tensors, found_N2, strict=True):
        _add(values, found, 1, 0, 0, placed=False)
    return _read(found_N2)


def placed_sum(values_RC: Tensor, first: int, distance: int) -> tuple[int, bool]:
    """Return `mixed_sum` of a contiguous slice of a larger tensor. Its first element has the index
    `first` there, and its rows are `distance` elements apart. The sums of all slices add up, modulo
    2^64, to the sum of the tensor.
    """
    found_N2 = torch.zeros(1, 2, dtype=torch.int64, device=values_RC.device)
    _add(values_RC, found_N2[0], values_RC.shape[1], first, distance, placed=True)
    return _read(found_N2)[0]


def _add(
    values: Tensor, found: Tensor, columns: int, first: int, distance: int, *, placed: bool
) -> None:
    assert values.is_contiguous() and not values.is_complex()
    if values.numel():
        with torch.cuda.device_of(values):  # it may be another GPU than the engine's
            _sum[(triton.cdiv(values.numel(), _BLOCK * _BLOCKS),)](
                values,
                found,
                values.numel(),
                columns,
                first,
                distance,
                FLOAT=values.is_floating_point(),
                PLACED=placed,
                BLOCK=_BLOCK,
                BLOCKS=_BLOCKS,
            )


def _read(found_N2: Tensor) -> list[tuple[int, bool]]:
    with torch.cuda.device_of(found_N2):
        return [(total % 2**64, not strange) for total, strange in found_N2.tolist()]
