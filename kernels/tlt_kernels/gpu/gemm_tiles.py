"""The tile of a matmul at its number of rows, and the leaves of K. The figures were measured on one
H200.

Tiles change no bits (see `gemm.py`). Leaves do, so their number does not depend on the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch

BLOCK, E4M3 = 128, torch.float8_e4m3fn  # those of `quantise`, which needs Triton
# Cost of a piece relative to its share of a tile: it reads as many weights for fewer products.
PIECE_COST = 1.5
# Part of the programs, over all rounds, that a tile must keep busy. The last of an entry need not.
FULL = 0.8
# Leaves of K in an o or down projection, unless a model asks for more.
LEAVES = 2
LEAF_COUNTS = (1, 2, 4, 8)
# Partial sums at least, if there are as many leaves: 64-row tiles of few rows then fill the GPU.
# Ranks that exchange them may ask for one, which is half as much to read.
PARTS = 2
# Elements of K: a multiple of every tile's depth, so that no step crosses the end of a leaf.
LEAF_UNIT = 128


class Kind(Enum):
    LINEAR = "linear"
    HEAD = "head"  # a linear layer with enough outputs to fill the multiprocessors with any tile
    PARTIALS = "partials"
    FOLDED = "folded"  # fewer partial sums than leaves: a program adds several
    GATED = "gated"


@dataclass(frozen=True)
class Tile:
    rows: int  # rows of x
    columns: int  # rows of the weight; if gated, both halves (`gemm_portable`: one)
    depth: int  # elements of K per step
    warps: int
    stages: int  # steps in flight, the one in use included
    group: int = 1  # tiles along M that run together on the same weights
    pieces: int = 1  # cuts along M of the tiles of a last round that does not fill the machine
    most: int = 4  # leaves that a program adds at most: it holds log2(most) + 1 sums in registers
    x_first: bool = False  # x is the first operand of the tensor cores, not the weight

    def fold(self, leaves: int, parts: int) -> int:
        """Return the number of leaves that a program adds, for at least `parts` partial sums."""
        return max(1, min(self.most, leaves // parts))

    @property
    def piece(self) -> int:
        return self.rows // self.pieces


_MANY = 1 << 30
# (rows at most, tiles): `stream_tile` takes the first that fills its rounds, else the last.
_Table = tuple[tuple[int, tuple[Tile, ...]], ...]
_WIDE = (_MANY, (Tile(256, 128, 64, 8, 4, group=4, pieces=2, most=1),))
_PARTIALS: _Table = (
    (16, (Tile(16, 64, 128, 4, 10),)),
    (32, (Tile(32, 64, 128, 4, 8),)),
    (64, (Tile(64, 64, 128, 4, 5), Tile(64, 64, 128, 4, 6, pieces=2))),
    (128, (Tile(128, 128, 64, 8, 6, most=2), Tile(128, 64, 64, 4, 8, pieces=2, most=2))),
    (384, (Tile(128, 128, 64, 8, 6, group=2, pieces=2, most=2),)),
    (512, (Tile(128, 128, 64, 8, 6, group=4, pieces=4, most=2),)),
)
_STREAM: dict[Kind, _Table] = {
    Kind.LINEAR: (
        (16, (Tile(16, 64, 128, 4, 10),)),
        (32, (Tile(32, 64, 128, 4, 8),)),
        (64, (Tile(64, 64, 64, 4, 12),)),
        (128, (Tile(128, 64, 64, 4, 8, pieces=2),)),
        (256, (Tile(128, 64, 64, 4, 9, group=2, pieces=2),)),
        (512, (Tile(128, 128, 64, 8, 6, group=4, pieces=4),)),
        _WIDE,
    ),
    Kind.HEAD: (
        (16, (Tile(16, 64, 128, 4, 10),)),
        (32, (Tile(32, 64, 128, 4, 8),)),
        (64, (Tile(64, 64, 64, 4, 12),)),
        (128, (Tile(128, 128, 64, 8, 6, pieces=2),)),
        _WIDE,
    ),
    Kind.PARTIALS: (*_PARTIALS, _WIDE),
    # A program of wide tiles has no registers for two sums.
    Kind.FOLDED: (*_PARTIALS, (_MANY, (Tile(128, 128, 64, 8, 6, group=4, pieces=2, most=2),))),
    Kind.GATED: (
        (16, (Tile(16, 64, 128, 4, 6),)),
        (32, (Tile(32, 128, 128, 8, 4), Tile(32, 64, 128, 4, 6, pieces=2))),
        (64, (Tile(64, 128, 64, 8, 6), Tile(64, 64, 64, 4, 12))),
        (128, (Tile(128, 256, 64, 8, 4), Tile(128, 128, 64, 8, 6, pieces=4))),
        (384, (Tile(128, 128, 64, 8, 6, group=4, pieces=2),)),
        (512, (Tile(256, 128, 64, 8, 4, group=2, pieces=2),)),
        (_MANY, (Tile(256, 128, 64, 8, 4, group=4, pieces=4),)),
    ),
}
# Tiles of e4m3 operands: a warpgroup of four warps has 64 rows of the first operand.
_FEW_SCALED: _Table = ((16, (Tile(16, 64, 128, 4, 20),)), (32, (Tile(32, 64, 128, 4, 16),)))
_SCALED_64 = Tile(64, 64, 128, 4, 12, most=2)
_SCALED_128 = Tile(128, 128, 128, 8, 6, most=2, x_first=True)
_SCALED_WIDE = Tile(128, 256, 128, 8, 4, most=1, x_first=True)
_SCALED_LINEAR: _Table = (
    *_FEW_SCALED,
    (64, (replace(_SCALED_64, x_first=True),)),
    (128, (replace(_SCALED_128, columns=64, stages=8),)),
    (256, (replace(_SCALED_128, group=2),)),
    (512, (replace(_SCALED_128, group=4, pieces=2),)),
    (1024, (replace(_SCALED_128, group=8, pieces=2),)),
    (_MANY, (replace(_SCALED_WIDE, group=8, pieces=2),)),
)
_SCALED_PARTIALS: _Table = (
    *_FEW_SCALED,
    (64, (_SCALED_64,)),
    (128, (replace(_SCALED_128, columns=64, stages=8),)),
    (256, (replace(_SCALED_128, group=2),)),
    (512, (replace(_SCALED_128, group=4),)),
    (_MANY, (replace(_SCALED_128, group=8, pieces=2),)),
)
_SCALED: dict[Kind, _Table] = {
    Kind.LINEAR: _SCALED_LINEAR,
    # Wide sums in float32 do not fit a thread's registers.
    Kind.HEAD: (*_SCALED_LINEAR[:-2], (_MANY, (replace(_SCALED_128, group=8, pieces=2),))),
    Kind.PARTIALS: _SCALED_PARTIALS,
    Kind.FOLDED: _SCALED_PARTIALS,
    Kind.GATED: (
        *_FEW_SCALED,
        (64, (replace(_SCALED_64, x_first=True),)),
        (128, (replace(_SCALED_128, pieces=2),)),
        (256, (replace(_SCALED_WIDE, group=2, pieces=2),)),
        (512, (replace(_SCALED_WIDE, group=4, pieces=2),)),
        (1024, (replace(_SCALED_WIDE, group=8),)),
        (_MANY, (replace(_SCALED_WIDE, group=16),)),
    ),
}
_PORTABLE = (
    (16, Tile(16, 64, 64, 4, 4)),
    (64, Tile(64, 64, 64, 4, 4)),
    (256, Tile(128, 64, 64, 4, 6, group=4)),
    (_MANY, Tile(256, 64, 64, 8, 4, group=16)),
)
_PORTABLE_FLOAT32 = Tile(16, 32, 32, 4, 2)


def leaf_size(inputs: int, leaves: int) -> int:
    """Return the elements of K in a leaf. The last leaf may be shorter, and a short K has fewer."""
    return -(-inputs // (LEAF_UNIT * leaves)) * LEAF_UNIT


def kind_of_partials(leaves: int, parts: int) -> Kind:
    return Kind.FOLDED if leaves > parts else Kind.PARTIALS


def kind_of_linear(n: int) -> Kind:
    return Kind.HEAD if n >= 16384 else Kind.LINEAR


def stream_tile(
    kind: Kind,
    rows: int,
    columns: int,
    programs: int,
    leaves: int = 1,
    parts: int = 1,
    *,
    scaled: bool = False,
) -> Tile:
    """Return the tile for a matmul with this many rows of the weight, which has scales or not.

    Tiles before the last of an entry read x less often, or are not cut. They are chosen if their
    last round leaves few programs idle; else the last one spreads better.
    """
    table = (_SCALED if scaled else _STREAM)[kind]
    *first, last = next(tiles for most, tiles in table if rows <= most)
    for tile in first:
        count = -(-columns // tile.columns) * (leaves // tile.fold(leaves, parts))
        if count >= FULL * programs * -(-count // programs):
            return tile
    return last


def portable_tile(rows: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:
        return _PORTABLE_FLOAT32
    tile = next(tile for most, tile in _PORTABLE if rows <= most)
    return replace(tile, depth=BLOCK) if dtype == E4M3 else tile


def split_last_round(tiles: int, programs: int, pieces: int) -> tuple[int, int]:
    """Return the number of items, and the number of whole tiles among them. The tiles of an
    incomplete last round of programs are cut into `pieces` if that ends sooner than whole tiles on
    a few programs would.
    """
    whole = tiles // programs * programs
    cut = (tiles - whole) * pieces
    sooner = -(-cut // programs) * PIECE_COST < pieces
    return (whole + cut, whole) if cut and sooner else (tiles, tiles)
