"""Two networks change places: graphs hold the addresses of one of them, so it is their values that
move.

On one device both are read and written once, which takes no memory; tensors that lie next to each
other in both networks go with one launch. A network that was staged in host memory goes tile by
tile.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from tlt_kernels.gpu.swap import swap, variant

TILE_BYTES = 16 * 2**20
GAP_BYTES = 256  # at most between neighbours, where allocations align tensors

Pair = tuple[Tensor, Tensor]


@runtime_checkable
class Stored(Protocol):
    def storage(self) -> list[Tensor]:
        """Everything that makes a version, in a fixed order; contiguous."""


def exchange(resident: Stored, other: Stored) -> None:
    """`other` takes over the storage that graphs know, with its own values in it; `resident` keeps
    its values in the other storage.
    """
    if resident is other:
        return  # written in place
    pairs = neighbours_joined(list(zip(resident.storage(), other.storage(), strict=True)))
    swap([(mine, theirs) for mine, theirs in pairs if mine.device == theirs.device])
    for mine, theirs in pairs:
        if mine.device != theirs.device:
            _through_tiles(mine, theirs)
    resident.__dict__, other.__dict__ = other.__dict__, resident.__dict__


def neighbours_joined(pairs: list[Pair]) -> list[Pair]:
    """Return tensors that cover these pairs, and the gaps between neighbours."""
    joined: list[Pair] = []
    for pair in sorted(pairs, key=lambda pair: pair[0].data_ptr()):
        if joined and (gap := _gap(joined[-1], pair)) is not None:
            mine, theirs = joined[-1]
            more = gap + pair[0].numel()
            joined[-1] = _longer(mine, more), _longer(theirs, more)
        else:
            joined.append(pair)
    return joined


def _gap(first: Pair, second: Pair) -> int | None:
    """Return the elements from the end of one pair to the next; None where these are no
    neighbours.
    """
    gaps = set[int]()
    for before, after in zip(first, second, strict=True):
        one, other = before.untyped_storage(), after.untyped_storage()
        if before.dtype != after.dtype or one.data_ptr() != other.data_ptr():
            return None
        gaps.add(after.data_ptr() - before.data_ptr() - before.nbytes)
    gap = gaps.pop()
    between = not gaps and 0 <= gap <= GAP_BYTES and not gap % first[0].itemsize
    return gap // first[0].itemsize if between else None


def _longer(tensor: Tensor, more: int) -> Tensor:
    """Return the tensor's elements and those that follow it in its storage."""
    return tensor.as_strided((tensor.numel() + more,), (1,))


def _through_tiles(mine: Tensor, theirs: Tensor) -> None:
    rows = max(1, TILE_BYTES * len(mine) // mine.nbytes)
    for my_tile, their_tile in zip(mine.split(rows), theirs.split(rows), strict=True):
        kept = my_tile.clone()
        my_tile.copy_(their_tile)
        their_tile.copy_(kept)


def compile_exchange(network: Stored) -> None:
    """Compile before the first commit: run each kernel for its tensors once, with equal values.
    What is exchanged has the same layout.
    """
    smallest = {
        variant(tensor, tensor): tensor
        for tensor in sorted(network.storage(), key=lambda tensor: -tensor.numel())
    }
    swap([(tensor, tensor.clone()) for tensor in smallest.values()])
