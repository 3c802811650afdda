"""Flags of `tlt doctor` in addition to those of `tlt serve`; light, because `tlt --help` imports
it.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", dest="as_json", action="store_true", help="print the findings as one JSON object"
    )
