"""Swaps the values of two networks: graphs hold the addresses of one of them.

On one device both are read and written once, without extra memory. A network that was staged in
host memory is swapped tile by tile.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from tlt_kernels.gpu.swap import swap, variant

TILE_BYTES = 16 * 2**20


@runtime_checkable
class Stored(Protocol):
    def storage(self) -> list[Tensor]:
        """Return all tensors of a version, in a fixed order; contiguous."""


def swap_networks(resident: Stored, other: Stored) -> None:
    """Swap two networks. `other` gets the storage that graphs know, with its own values in it;
    `resident` keeps its values in the other storage.
    """
    if resident is other:
        return  # written in place
    pairs = list(zip(resident.storage(), other.storage(), strict=True))
    swap([(mine, theirs) for mine, theirs in pairs if mine.device == theirs.device])
    for mine, theirs in pairs:
        if mine.device != theirs.device:
            _through_tiles(mine, theirs)
    resident.__dict__, other.__dict__ = other.__dict__, resident.__dict__


def _through_tiles(mine: Tensor, theirs: Tensor) -> None:
    rows = max(1, TILE_BYTES * len(mine) // mine.nbytes)
    for my_tile, their_tile in zip(mine.split(rows), theirs.split(rows), strict=True):
        kept = my_tile.clone()
        my_tile.copy_(their_tile)
        their_tile.copy_(kept)


def compile_swaps(network: Stored) -> None:
    """Compile before the first commit: run each kernel for the network's tensors once, with equal
    values. Swapped networks have the same layout.
    """
    smallest = {
        variant(tensor, tensor): tensor
        for tensor in sorted(network.storage(), key=lambda tensor: -tensor.numel())
    }
    swap([(tensor, tensor.clone()) for tensor in smallest.values()])
