"""Flags of `tlt bench gemm`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from tlt_server.bench.numbers import count
from tlt_server.bench.padding.shapes import SHAPES
from tlt_server.shared_settings import SPLITS


def add_gemm(
    parser: argparse.ArgumentParser, add_json: Callable[[argparse.ArgumentParser], None]
) -> None:
    parser.add_argument(
        "--shape", choices=SHAPES, default="qwen2.5-7b", help="of the model [default qwen2.5-7b]"
    )
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        choices=SPLITS,
        default=1,
        metavar="N",
        help="ranks, of which one is timed, without its exchanges: 1, 2, 4 or 8 [default 1]",
    )
    parser.add_argument(
        "--rows",
        type=_row_counts,
        default="1,2,8,16,32,64,128,256,512,2048,8192",
        metavar="N,N,...",
        help="rows of a step [default %(default)s]",
    )
    parser.add_argument(
        "--leaves",
        type=_leaf_counts,
        metavar="N,N,...",
        help="leaves of K in o and down projections, over all ranks, of 1, 2, 4 and 8, in turns "
        "[default 2, or one for each rank]",
    )
    add_json(parser)


def _row_counts(text: str) -> tuple[int, ...]:
    return tuple(count(part) for part in text.split(","))


def _leaf_counts(text: str) -> tuple[int, ...]:
    counts = _row_counts(text)
    if unknown := [leaves for leaves in counts if leaves not in SPLITS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is no number of leaves: 1, 2, 4 or 8 are")
    return counts
