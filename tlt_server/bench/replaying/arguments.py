"""Flags of `tlt bench record` and `tlt bench replay`. Light, because `tlt --help` imports it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tlt_server.errors import StartupError

if TYPE_CHECKING:
    from tlt_server.commands import SetPolicy

MAX_REQUESTS = 4096
MAX_WIDTH = 8
Flags = Callable[[argparse.ArgumentParser], None]


def add_record(parser: argparse.ArgumentParser, engine: Flags, out: Callable[[str], Path]) -> None:
    parser.description = RECORD
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    engine(parser)
    parser.add_argument("--out", required=True, type=out, metavar="FILE", help="the record")
    parser.add_argument(
        "--requests",
        type=_count,
        metavar="N",
        help="responses in all [default 64 on a CPU, 512 on a GPU]",
    )
    parser.add_argument(
        "--group", type=_count, default=8, metavar="N", help="responses to a problem [default 8]"
    )
    parser.add_argument(
        "--running",
        type=_count,
        metavar="N",
        help="requests that run at once [default 64 on a CPU, 256 on a GPU]",
    )
    parser.add_argument(
        "--max-tokens", type=_count, metavar="N", help="of a response [default 2000]"
    )
    parser.add_argument(
        "--width",
        type=_widths,
        metavar="N,N,...",
        help="children per node of the trees that are drafted at every position; a replay has "
        "strategies of these widths [default all that policies choose]",
    )
    parser.add_argument(
        "--policy",
        type=policy,
        action="append",
        metavar="NAME",
        help="run and time the rollout under this policy, e.g. off, goodput, fixed:eagle:7x1x8; "
        "more of them show the cost model more shapes [default off, chains of 2, 4 and 7, beg, "
        "goodput]",
    )


def add_replay(parser: argparse.ArgumentParser, output: Flags) -> None:
    parser.description = REPLAY
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", type=Path, metavar="FILE", help="what `tlt bench record` wrote")
    parser.add_argument(
        "--policy",
        type=policy,
        action="append",
        metavar="NAME",
        help="replay under this policy, e.g. goodput, fixed:eagle:7x1x8 [default off, goodput, "
        "beg]",
    )
    parser.add_argument(
        "--rounds",
        type=_count,
        default=1,
        metavar="N",
        help="replays in a row, of which the last counts; a policy keeps what it knows of steps "
        "and drafts [default 1: the first rollout after a start]",
    )
    parser.add_argument(
        "--plots",
        type=Path,
        metavar="DIR",
        help="write plots (PNG) of each policy: the rollout's course, and predicted survivals "
        "against what was accepted; needs matplotlib",
    )
    output(parser)


RECORD = """\
Run a rollout of the demo task and store it, so that `tlt bench replay` can judge any policy on it.

The rollout runs once under each --policy, which times its cycles, and once more per --width to
draft at every position. Responses do not depend on what drafted them, so one record tells what any
strategy would have gained.
"""
REPLAY = """\
Replay a recorded rollout under policies, without a model: seconds, tokens per second, switches, and
regret against the best choice of every step in hindsight.

Tokens and accepted drafts are those of the record, seconds those of a cost model fitted to its
cycles, so a replay takes seconds and needs no GPU.
"""
EXAMPLES = """\
examples:
  tlt bench record --out /tmp/rollout.safetensors
  tlt bench record --device cuda --model DIR --drafter DIR --out gpu.safetensors
  tlt bench replay /tmp/rollout.safetensors --policy goodput --policy fixed:eagle:7x1x8
  tlt bench replay gpu.safetensors --rounds 2 --plots plots --json replay.json
"""


def policy(text: str) -> SetPolicy:
    from tlt_server.bench.replaying.names import parse_policy

    try:
        return parse_policy(text)
    except StartupError as error:
        raise argparse.ArgumentTypeError(error.message) from error


def _count(text: str) -> int:
    return _whole(text, MAX_REQUESTS)


def _widths(text: str) -> tuple[int, ...]:
    return tuple(sorted({_whole(part, MAX_WIDTH) for part in text.split(",")}))


def _whole(text: str, largest: int) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= largest:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to {largest}")
    return int(text)
