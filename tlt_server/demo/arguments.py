"""Flags of `tlt demo`; light, because `tlt --help` imports it."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer and shorter responses")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="target model [directory; default the shipped pair's]",
    )
    parser.add_argument(
        "--drafter", metavar="DIR", help="drafter [directory | history; default the shipped pair's]"
    )
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="compute threads [default: processors this process may use]",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the first response [default 0]"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
