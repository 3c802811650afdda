"""Flags of `tlt bench serve`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from tlt_server.bench.numbers import count, seed

OBJECTIVES = ("ttft", "tpot", "e2el")  # in ms


def add_serve(
    parser: argparse.ArgumentParser, add_json: Callable[[argparse.ArgumentParser], None]
) -> None:
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="server with the OpenAI API [default %(default)s]",
    )
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file whose first key is sent [default: none]",
    )
    for name, default, unit in (
        ("--num-prompts", 200, "requests in all"),
        ("--input-len", 512, "tokens of a prompt"),
        ("--output-len", 128, "tokens of an output"),
        ("--vocab", 1000, "prompts are random token ids below this"),
    ):
        parser.add_argument(
            name, type=count, default=default, metavar="N", help=f"{unit} [default {default}]"
        )
    parser.add_argument(
        "--request-rate",
        type=_rate,
        default=0.0,
        metavar="N",
        help="requests per second on average, at random moments [default inf: all at once]",
    )
    parser.add_argument(
        "--goodput",
        type=_objectives,
        default={},
        metavar="NAME:MS,...",
        help=f"count requests within these times: {', '.join(OBJECTIVES)}; e.g. ttft:500,tpot:40",
    )
    parser.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="of prompts and moments [default 0]"
    )
    add_json(parser)


def _rate(text: str) -> float:
    """Return requests per second, 0 for `inf`."""
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0.001 <= rate <= 1e5 and rate != math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate from 0.001 to 100000, nor inf")
    return 0.0 if rate == math.inf else rate


def _objectives(text: str) -> dict[str, int]:
    pairs = [part.partition(":") for part in text.split(",")]
    for name, _, _ in pairs:
        if name not in OBJECTIVES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(OBJECTIVES)}")
    return {name: count(limit_ms) for name, _, limit_ms in pairs}
