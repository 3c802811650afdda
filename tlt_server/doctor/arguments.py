"""Flags of `tlt doctor` in addition to those of `tlt serve`; light, because `tlt --help` imports
it.
"""

from __future__ import annotations

import argparse

from tlt_server.bench.flags import add_flags
from tlt_server.fleet.arguments import FLAGS

OF_A_CLUSTER = ("--replicas", "--ray-labels", "--replica-cpus")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", dest="as_json", action="store_true", help="print the findings as one JSON object"
    )
    parser.add_argument(
        "--launcher",
        choices=("ray",),
        help="also check the Ray cluster at RAY_ADDRESS, for a fleet of such servers",
    )
    add_flags(parser, tuple(each for each in FLAGS if each.name in OF_A_CLUSTER))
