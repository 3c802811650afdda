"""Which tile of a matrix product runs at how many rows, and in how many segments K is cut: figures of one H200.

Tiles change no bits (see `gemm.py`), segments do: `segments_of` therefore looks at the weight's shape alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

SEGMENT_UNIT = 128  # elements of K; a multiple of every tile's depth, so that no step crosses a segment's end


class Kind(Enum):
    LINEAR = "linear"
    PARTIALS = "partials"
    GATED = "gated"


@dataclass(frozen=True)
class Tile:
    rows: int  # of x
    columns: int  # rows of the weight; of each half where gated
    depth: int  # elements of K per step
    warps: int
    stages: int  # tiles in flight, the one in use included
    swap: bool = True  # the weight is the tensor cores' first operand: few rows of x then waste nothing
    added: bool = False  # one program adds all segments, rather than one program each
    group: int = 1  # tiles along M that run side by side on the same weights
    ahead: int = 0  # elements of each weight row that a program asks L2 for while it waits for the kernel before it


_FLOAT32 = Tile(16, 32, 32, 4, 2)

_TILES: dict[Kind, tuple[tuple[int, Tile], ...]] = {
    Kind.LINEAR: (
        (16, Tile(16, 32, 128, 4, 4, ahead=512)),
        (32, Tile(32, 64, 128, 4, 4, ahead=512)),
        (64, Tile(64, 64, 128, 4, 4, ahead=512)),
        (128, Tile(128, 64, 128, 4, 4, ahead=512)),
    ),
    Kind.PARTIALS: (
        (16, Tile(16, 64, 128, 4, 4, ahead=512)),
        (32, Tile(32, 64, 128, 4, 4, ahead=512)),
        (64, Tile(64, 128, 64, 4, 4, ahead=512)),
        (128, Tile(128, 128, 64, 8, 4, ahead=512)),
    ),
    Kind.GATED: (
        (16, Tile(16, 64, 64, 4, 4, ahead=512)),
        (32, Tile(32, 64, 64, 4, 4, ahead=512)),
        (64, Tile(64, 64, 64, 4, 4, ahead=512)),
        (128, Tile(128, 64, 64, 8, 4, ahead=512)),
    ),
}
_WIDE: dict[Kind, Tile] = {
    Kind.LINEAR: Tile(128, 256, 64, 8, 4, swap=False, group=16),
    Kind.PARTIALS: Tile(128, 128, 64, 8, 4, swap=False, group=16, added=True),
    Kind.GATED: Tile(128, 128, 64, 8, 4, swap=False, group=16),
}


def tile_for(kind: Kind, rows: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:
        return _FLOAT32
    return next((tile for most, tile in _TILES[kind] if rows <= most), _WIDE[kind])


def segments_of(n: int, k: int) -> int:
    """In how many segments the K of an o or down projection [n, k] is cut."""
    return 4
