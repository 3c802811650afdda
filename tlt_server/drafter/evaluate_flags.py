"""Flags of `tlt drafter evaluate`. Light, because `tlt --help` imports it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from tlt_server.bench.flags import JSON, add_flags
from tlt_server.wire.tree_limits import MAX_DEPTH, MAX_ROWS, MAX_WIDTH

MAX_RESPONSES = 2**20
MAX_BATCH = 4096


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.description = EVALUATE
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--record",
        required=True,
        type=Path,
        metavar="FILE",
        help="file of `tlt bench record`, or directory of the segments that a server has kept",
    )
    parser.add_argument(
        "--target", required=True, type=Path, metavar="DIR", help="the target that was recorded"
    )
    parser.add_argument(
        "--drafter",
        required=True,
        type=Path,
        action="append",
        metavar="DIR",
        help="a drafter; the others are compared with the first one",
    )
    shape = parser.add_argument_group("what is drafted at every root")
    for name, default, largest, sentence in (
        ("depth", 7, MAX_DEPTH, "length of the longest path"),
        ("width", 4, MAX_WIDTH, "children per node, and nodes expanded per level"),
        ("rows", 16, MAX_ROWS, "rows verified per request, the root included"),
    ):
        shape.add_argument(
            f"--{name}",
            type=whole(1 + (name == "rows"), largest),
            default=default,
            metavar="N",
            help=f"{sentence} [default {default}]",
        )
    shape.add_argument(
        "--as-recorded",
        action="store_true",
        help="instead, the strategy and the rows that the server had at this place of the response",
    )
    parser.add_argument(
        "--policy",
        metavar="NAME",
        help="recorded policy whose cycles --as-recorded takes [default: the last that drafts]",
    )
    parser.add_argument(
        "--self-check",
        action="store_true",
        help="first compare the first drafter with what the server accepted, cycle by cycle; exit "
        "status 1 if anything differs",
    )
    parser.add_argument(
        "--version",
        metavar="NAME",
        help="evaluate responses of this version of the target's weights [default: the only one]",
    )
    parser.add_argument(
        "--responses",
        type=whole(1, MAX_RESPONSES),
        metavar="N",
        help="the first N responses [default all]",
    )
    parser.add_argument(
        "--batch",
        type=whole(1, MAX_BATCH),
        metavar="N",
        help="requests in a cycle, for its time [default: as in the median recorded cycle]",
    )
    parser.add_argument(
        "--kind",
        type=kind,
        action="append",
        default=[],
        metavar="NAME=REGEX",
        help="also tell apart the responses whose prompt's text matches, e.g. 'countdown=Reach'",
    )
    parser.add_argument(
        "--threads",
        type=whole(1, 1024),
        metavar="N",
        help="compute threads [default: processors this process may use]",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="where to replay [default: cuda where a server would take it, unless a CPU recorded]",
    )
    add_flags(parser, JSON)


EVALUATE = """\
Replay recorded responses through drafters: the accept length that each would have had, exactly.

A response is fixed by target, prompt and seed, with any drafter. So no target pass verifies
anything; the target only computes the features that drafters read. On the kind of device that
recorded, the counts are the server's to the last one, if it ran with the default numerics, dtype
and reduction leaves.
"""
EXAMPLES = """\
examples:
  tlt bench record --quick --out rollout.safetensors
  tlt drafter evaluate --record rollout.safetensors --target TARGET --drafter OLD --drafter NEW
  tlt drafter evaluate --record rollout.safetensors --target TARGET --drafter OLD --self-check
"""


def whole(smallest: int, largest: int) -> Callable[[str], int]:
    """Return a parser of whole numbers within these bounds."""

    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not smallest <= int(text) <= largest:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no whole number from {smallest} to {largest}"
            )
        return int(text)

    return parse


def kind(text: str) -> tuple[str, str]:
    import re

    name, equals, pattern = text.partition("=")
    try:
        re.compile(pattern)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{pattern!r} is no regular expression: {error}") from None
    if not equals or not name or not pattern:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=REGEX")
    return name, pattern
