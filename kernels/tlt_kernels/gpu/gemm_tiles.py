"""Which tile of a matrix product runs at how many rows, and in how many segments K is cut: figures of one H200.

Tiles change no bits (see `gemm.py`), segments do: `segments_of` therefore looks at the weight's shape alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

SEGMENT_UNIT = 128  # elements of K; a multiple of every tile's depth, so that no step crosses a segment's end
HEAD_COLUMNS = 16384  # from here on a weight has enough rows for every multiprocessor whatever the tile


class Kind(Enum):
    LINEAR = "linear"
    HEAD = "head"
    PARTIALS = "partials"
    GATED = "gated"


@dataclass(frozen=True)
class Tile:
    rows: int  # of x
    columns: int  # rows of the weight; of each half where gated
    depth: int  # elements of K per step
    warps: int
    stages: int  # tiles in flight, the one in use included
    swap: bool = True  # the weight is the tensor cores' first operand: fewer rows of x than 64 then waste nothing
    group: int = 1  # tiles along M that run side by side on the same weights


_FLOAT32 = Tile(16, 32, 32, 4, 2)

_TILES: dict[Kind, tuple[tuple[int, Tile], ...]] = {
    Kind.LINEAR: (
        (16, Tile(16, 64, 128, 4, 5)),
        (32, Tile(32, 64, 128, 4, 8)),
        (64, Tile(64, 64, 128, 4, 6)),
        (128, Tile(128, 64, 64, 4, 8)),
        (256, Tile(64, 256, 64, 4, 5, swap=False, group=4)),
    ),
    Kind.HEAD: (
        (16, Tile(16, 64, 128, 4, 5)),
        (32, Tile(32, 128, 64, 4, 5)),
        (64, Tile(64, 128, 64, 4, 3)),
    ),
    Kind.PARTIALS: (
        (16, Tile(16, 64, 128, 4, 7)),
        (32, Tile(32, 64, 128, 4, 8)),
        (64, Tile(64, 64, 64, 4, 8)),
        (128, Tile(128, 64, 64, 4, 8)),
        (256, Tile(128, 128, 64, 4, 6, group=4)),
    ),
    Kind.GATED: (
        (16, Tile(16, 32, 128, 4, 3)),
        (32, Tile(32, 64, 128, 4, 5)),
        (64, Tile(64, 64, 128, 4, 4)),
        (256, Tile(128, 64, 64, 4, 6, group=4)),
    ),
}
_WIDE: dict[Kind, Tile] = {
    Kind.LINEAR: Tile(128, 128, 64, 8, 6, group=16),
    Kind.HEAD: Tile(128, 256, 64, 8, 4, swap=False, group=4),
    Kind.PARTIALS: Tile(128, 256, 64, 8, 3, swap=False, group=4),
    Kind.GATED: Tile(256, 64, 64, 8, 4, group=16),
}


def tile_for(kind: Kind, rows: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:
        return _FLOAT32
    return next((tile for most, tile in _TILES[kind] if rows <= most), _WIDE[kind])


def segments_of(n: int, k: int) -> int:
    """In how many segments the K of an o or down projection [n, k] is cut: two let 64-row tiles of few-row products fill the chip."""
    return 2
