"""Flags of `tlt bench rollout`. Light, because `tlt --help` imports it."""

from __future__ import annotations

import argparse
import re

from tlt_server.bench.replaying.arguments import Flags, policy

ROLLOUT = """\
Time rollouts of the demo task, with speculation off and on.

Without --http: this process drives the engine; our engine without speculation, in strict and in
fast numerics, is what every arm is compared with. With --http: a server of its own is sent whole
rollouts; each policy runs every workload with every seed, and every response is compared.
"""
EXAMPLES = """\
examples:
  tlt bench rollout --quick
  tlt bench rollout --http --device cuda --model DIR --drafter DIR --json rollout-http.json
  tlt bench rollout --http --workload 512 --workload "full 64" --policy goodput --policy off
"""


def add_rollout(parser: argparse.ArgumentParser, engine: Flags, ranks: Flags) -> None:
    parser.description = ROLLOUT
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    engine(parser)
    ranks(parser)
    http = parser.add_argument_group("over HTTP")
    http.add_argument("--http", action="store_true", help="time rollouts against a server")
    http.add_argument(
        "--workload",
        type=_workload,
        action="append",
        metavar="SIZE",
        help='requests of a rollout, such as 64, or "full 64": that many kept running [default 64 '
        'on a CPU; 64, 256, 512, "full 64" and "full 256" on a GPU]',
    )
    http.add_argument(
        "--policy",
        type=policy,
        action="append",
        metavar="NAME",
        help="run under this policy, e.g. goodput, fixed:eagle:7x1x8; responses are compared with "
        "the first one's [default goodput, off, beg and a few fixed strategies]",
    )
    http.add_argument(
        "--seeds",
        type=_seeds,
        metavar="N,...",
        help="one run of every policy and workload per seed [default 21,22,23,24,25]",
    )
    http.add_argument(
        "--max-running", type=_count, metavar="N", help="of the server [default 256]", default=256
    )
    http.add_argument(
        "--max-tokens", type=_count, metavar="N", help="per response [default 2000]", default=2000
    )
    http.add_argument(
        "--pair",
        default="demo",
        metavar="NAME",
        help="of the models, in the figures [default demo]",
    )
    http.add_argument(
        "--penalties",
        action="store_true",
        help="give every request a repetition and a presence penalty",
    )


def _workload(text: str) -> str:
    if not re.fullmatch(r"(full )?[1-9][0-9]{0,3}", text):
        raise argparse.ArgumentTypeError(
            f'{text!r} is no workload: name a number of requests, such as 64, or "full 64"'
        )
    return text


def _seeds(text: str) -> tuple[int, ...]:
    return tuple(_whole(part, 0, 2**31) for part in text.split(","))


def _count(text: str) -> int:
    return _whole(text, 1, 2**20)


def _whole(text: str, smallest: int, largest: int) -> int:
    if not text.isascii() or not text.isdigit() or not smallest <= int(text) <= largest:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no whole number from {smallest} to {largest}"
        )
    return int(text)
