"""Subcommands of `tlt drafter` and their flags. Light, because `tlt --help` imports it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, get_args

from tlt_server.bench.flags import JSON, MAX_BATCH, Flag, add_flags, flag, whole
from tlt_server.models.draft_networks import NETWORKS, Layout
from tlt_server.push.arguments import add_server
from tlt_server.wire.tree_limits import MAX_DEPTH, MAX_ROWS, MAX_WIDTH

Runner = Callable[[str], Callable[[argparse.Namespace], int]]


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def kind(text: str) -> tuple[str, str]:
    name, equals, pattern = text.partition("=")
    try:
        re.compile(pattern)
    except re.error as error:
        raise argparse.ArgumentTypeError(
            f"{pattern!r} is not a regular expression: {error}"
        ) from None
    if not equals or not name or not pattern:
        raise argparse.ArgumentTypeError(f"{text!r} does not have the form NAME=REGEX")
    return name, pattern


def within(smallest: int, largest: int = 1 << 30) -> Callable[[str], int]:
    return partial(whole, smallest=smallest, largest=largest)


PAIR = (
    flag("--target DIR", "the target's model directory", required=True),
    flag("--out DIR", "drafter directory to write", required=True),
)
SEED = flag("--seed N", "of random weights and orders", 0, type=within(0))
INIT = (
    *PAIR,
    flag(f"--network {'|'.join(NETWORKS)}", "the kind of its network", "eagle3"),
    flag(
        "--data FILE",
        "text as for `tlt drafter train`, whose most frequent response tokens make the draft "
        "vocabulary [default: the first ids]",
        (),
        type=Path,
        nargs="+",
    ),
    flag(
        "--draft-vocab N",
        "tokens that can be drafted; all, where the target has fewer or its head drafts",
        32_000,
        type=within(1),
    ),
    flag(
        "--intermediate N",
        "width of the drafter's MLP [default: that of --start-from, else the target's]",
        type=within(1, 1 << 20),
    ),
    flag(
        "--start-from DIR",
        "take over this drafter's weights; its head's rows for the tokens that both draft",
    ),
    SEED,
)
TRAIN = (
    *PAIR,
    flag("--drafter DIR", "drafter to start from; `tlt drafter init` writes one", required=True),
    flag("--quantization none|fp8", "in which --target is served [default the checkpoint's]"),
    flag(
        "--data FILE",
        "segments of a server (.segment), rollouts of `tlt bench record` (.safetensors), or "
        'JSONL: {"prompt_ids": [...], "response_ids": [...]}, or {"messages": [...]} for the '
        "target's chat template",
        type=Path,
        nargs="+",
        required=True,
    ),
    flag(
        "--record FILE",
        "other responses, as for `tlt drafter evaluate`: calibration.json is fitted to them",
        type=Path,
    ),
    flag(
        "--stop-at LENGTH",
        "stop once chains as deep as --unroll have this accept length, replayed on --record",
        type=positive,
    ),
    flag("--check-every N", "steps between two replays for --stop-at", 50, type=within(1)),
    flag("--steps N", "optimizer steps", 1000, type=within(1)),
    flag("--objective eagle|hass|eagle3", "what the drafter is trained to match", "eagle3"),
    flag(
        "--acceptance none|total-variation|shared-noise",
        "further loss term: half the L1 distance of the distributions, or the chance that draft "
        "and target choose differently under one noise",
        "none",
    ),
    flag("--acceptance-weight X", "weight of that term", 0.5, type=positive),
    flag(
        "--unroll N",
        f"steps drafted ahead in training, at most {MAX_DEPTH} [default: the objective's: 1, 3, 7]",
        0,
        type=within(1, MAX_DEPTH),
    ),
    flag(
        "--budget N",
        "tokens of a pack; longer documents are cut into windows",
        2048,
        type=within(1),
    ),
    flag("--packs N", "packs of a step", 1, type=within(1)),
    flag(
        "--lr X",
        "learning rate [default 5e-5 at a hidden size of 3584, more for smaller ones in "
        "proportion]",
        type=positive,
    ),
    flag("--checkpoints DIR", "write checkpoints here, and resume from the newest one"),
    flag("--save-every N", "steps between two checkpoints", 200, type=within(1)),
    flag(
        "--device cpu|cuda",
        "where drafter and target run [default: cuda where a server would take it]",
    ),
    flag("--threads N", "compute threads of a CPU [default: torch's]", type=within(1)),
    SEED,
)
EXPORT = (
    *PAIR,
    flag("--drafter DIR", "drafter to export", required=True),
    flag(
        f"--layout {'|'.join(get_args(Layout))}",
        "eagle3: SafeAILab's; sglang; speculators: vLLM's; eagle1: SafeAILab's and SGLang's "
        "EAGLE-1 and EAGLE-2",
        required=True,
    ),
    flag(
        "--base TEXT",
        "name of the target for other engines, such as org/model [default: --target]",
        "",
    ),
    flag("--version TEXT", "version of the drafter, for the model card [default none]", ""),
    flag("--data TEXT", "what it was trained on, for the model card [default nothing]", ""),
    flag(
        "--record FILE",
        "replay the responses of `tlt bench record` through both drafters: they must accept the "
        "same in every cycle, and the model card says how much",
        type=Path,
    ),
)
EVALUATE = (
    flag(
        "--record FILE",
        "file of `tlt bench record`, or directory of the segments that a server has kept",
        type=Path,
        required=True,
    ),
    flag("--target DIR", "the target that was recorded", required=True),
    flag(
        "--drafter DIR",
        "a drafter; the others are compared with the first one",
        required=True,
        action="append",
    ),
    flag(
        "--drafter-quantization none|fp8",
        "how the drafters' matrices are kept [default: as when it was recorded]",
    ),
    flag("--depth N", "length of the longest path drafted", 7, type=within(1, MAX_DEPTH)),
    flag(
        "--width N", "children per node, and nodes expanded per level", 4, type=within(1, MAX_WIDTH)
    ),
    flag("--rows N", "rows verified per request, the root included", 16, type=within(2, MAX_ROWS)),
    flag(
        "--as-recorded",
        "instead, the strategy and the rows that the server had at this place of the response",
    ),
    flag(
        "--policy NAME",
        "recorded policy whose cycles --as-recorded takes [default: the last that drafts]",
    ),
    flag(
        "--self-check",
        "first compare the first drafter with what the server accepted, cycle by cycle; exit "
        "status 1 if anything differs",
    ),
    flag(
        "--version NAME",
        "evaluate responses of this version of the target's weights [default: the only one]",
    ),
    flag("--responses N", "the first N responses [default all]", type=within(1, 2**20)),
    flag(
        "--batch N",
        "requests in a cycle, for its time [default: as in the median recorded cycle]",
        type=within(1, MAX_BATCH),
    ),
    flag(
        "--kind NAME=REGEX",
        "also tell apart the responses whose prompt's text matches, e.g. 'countdown=Reach' "
        "[default none]",
        [],
        type=kind,
        action="append",
    ),
    flag(
        "--threads N",
        "compute threads [default: processors this process may use]",
        type=within(1, 1024),
    ),
    flag(
        "--device cpu|cuda",
        "where to replay [default: cuda where a server would take it, unless a CPU recorded]",
    ),
    *JSON,
)
EVALUATING = """\
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


class DrafterVerb(NamedTuple):
    sentence: str
    flags: tuple[Flag, ...] = ()
    loads_model: bool = False  # its libraries read the environment of strict numerics
    server: Callable[[argparse.ArgumentParser], None] = lambda parser: None  # flags of its access
    description: str = ""  # longer than the sentence, in lines
    epilog: str = ""


VERBS = {
    "status": DrafterVerb(
        "show the drafter of a running server and what it records", server=add_server
    ),
    "export": DrafterVerb("write a drafter in the layout of another engine", EXPORT, True),
    "init": DrafterVerb("write an untrained drafter for a target", INIT),
    "train": DrafterVerb("train a drafter on recorded text, without a server", TRAIN, True),
    "evaluate": DrafterVerb(
        "replay recorded responses through drafters",
        EVALUATE,
        True,
        description=EVALUATING,
        epilog=EXAMPLES,
    ),
}


def add_arguments(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], plain: Runner, strict: Runner
) -> None:
    """`plain` and `strict`: create the runner of a module; `strict` first sets the environment of
    strict numerics.
    """
    for name, verb in VERBS.items():
        parser = verbs.add_parser(
            name,
            help=verb.sentence,
            description=verb.description or verb.sentence,
            epilog=verb.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        add_flags(parser, verb.flags)
        verb.server(parser)
        run = strict if verb.loads_model else plain
        parser.set_defaults(run=run(f"tlt_server.drafter.{name}"), numerics="strict")
