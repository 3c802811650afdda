"""Subcommands of `tlt drafter` and their flags. Light, because `tlt --help` imports it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tlt_server.drafter.evaluate_flags import add_evaluate
from tlt_server.push.arguments import add_access, add_server
from tlt_server.wire.tree_limits import MAX_DEPTH

Runner = Callable[[str], Callable[[argparse.Namespace], int]]


# The rows of `trainer.export_layouts.EXPORTS`, which is slow to import.
LAYOUTS = ("eagle3", "sglang", "speculators", "eagle1")


class DrafterVerb(NamedTuple):
    sentence: str
    add: Callable[[argparse.ArgumentParser], None]
    loads_model: bool = False  # its libraries read the environment of strict numerics


def _init(parser: argparse.ArgumentParser) -> None:
    _pair(parser)
    parser.add_argument(
        "--data",
        type=Path,
        nargs="+",
        default=(),
        metavar="FILE",
        help="text as for `tlt drafter train`, whose most frequent response tokens make the draft "
        "vocabulary [default: the first ids]",
    )
    parser.add_argument(
        "--draft-vocab",
        type=_count,
        default=32_000,
        metavar="N",
        help="tokens that can be drafted; all, where the target has fewer [default 32000]",
    )
    parser.add_argument(
        "--intermediate",
        type=_width,
        metavar="N",
        help="width of the drafter's MLP [default: the target's]",
    )
    _seed(parser)


def _train(parser: argparse.ArgumentParser) -> None:
    _pair(parser)
    parser.add_argument(
        "--drafter",
        type=Path,
        required=True,
        metavar="DIR",
        help="drafter to start from; `tlt drafter init` writes one",
    )
    parser.add_argument(
        "--data",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="segments of a server (.segment), rollouts of `tlt bench record` (.safetensors), or "
        'JSONL: {"prompt_ids": [...], "response_ids": [...]}, or {"messages": [...]} for the '
        "target's chat template",
    )
    parser.add_argument(
        "--steps", type=_count, default=1000, metavar="N", help="optimizer steps [default 1000]"
    )
    parser.add_argument(
        "--objective",
        choices=("eagle", "hass", "eagle3"),
        default="eagle3",
        help="what the drafter is trained to match [default eagle3]",
    )
    parser.add_argument(
        "--acceptance",
        choices=("none", "total-variation", "shared-noise"),
        default="none",
        help="further loss term: half the L1 distance of the distributions, or the chance that "
        "draft and target choose differently under one noise [default none]",
    )
    parser.add_argument(
        "--acceptance-weight",
        type=_positive,
        default=0.5,
        metavar="X",
        help="weight of that term [default 0.5]",
    )
    parser.add_argument(
        "--unroll",
        type=_depth,
        default=0,
        metavar="N",
        help=f"steps drafted ahead in training, at most {MAX_DEPTH} [default: the objective's: 1, "
        "3, 7]",
    )
    parser.add_argument(
        "--budget",
        type=_count,
        default=2048,
        metavar="N",
        help="tokens of a pack; longer documents are cut into windows [default 2048]",
    )
    parser.add_argument(
        "--packs", type=_count, default=1, metavar="N", help="packs of a step [default 1]"
    )
    parser.add_argument(
        "--lr",
        type=_positive,
        metavar="X",
        help="learning rate [default 5e-5 at a hidden size of 3584, more for smaller ones in "
        "proportion]",
    )
    parser.add_argument(
        "--checkpoints",
        type=Path,
        metavar="DIR",
        help="write checkpoints here, and resume from the newest one",
    )
    parser.add_argument(
        "--save-every",
        type=_count,
        default=200,
        metavar="N",
        help="steps between two checkpoints [default 200]",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="where drafter and target run [default: cuda where a server would take it]",
    )
    parser.add_argument(
        "--threads", type=_count, metavar="N", help="compute threads of a CPU [default: torch's]"
    )
    _seed(parser)


def _export(parser: argparse.ArgumentParser) -> None:
    _pair(parser)
    parser.add_argument(
        "--drafter", type=Path, required=True, metavar="DIR", help="drafter to export"
    )
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        required=True,
        help="eagle3: SafeAILab's; sglang; speculators: vLLM's; eagle1: SafeAILab's and SGLang's "
        "EAGLE-1 and EAGLE-2",
    )
    for flag, sentence in (
        ("--base", "name of the target for other engines, such as org/model [default: --target]"),
        ("--version", "version of the drafter, for the model card"),
        ("--data", "what it was trained on, for the model card"),
    ):
        parser.add_argument(flag, default="", metavar="TEXT", help=sentence)
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="replay the responses of `tlt bench record` through both drafters: they must accept "
        "the same in every cycle, and the model card says how much",
    )


def _coordinate(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Each server needs --drafter-training idle, --drafter-feature-mb, --state-dir and http "
        "among its --weight-channels; the key needs the scopes operate and push-weights. "
        "Every round reads load and trainer of each server, "
        "lets one idle server train on what all have recorded, "
        "and pushes the drafter that it adopts to all, under one version. A server that does not "
        "answer, may not be asked with this key, or has another version of the target than most "
        "is named and left out until that changes. What an operator has paused stays paused. At "
        "the end, also by Ctrl-C, each server trains by itself again; where this process was "
        "killed, it does after --hold-s. Exit status "
        "of --once: 0 if a round has ended, 1 if no server could train or one refused the drafter."
    )
    parser.add_argument(
        "--servers",
        nargs="+",
        required=True,
        metavar="URL",
        help="addresses of servers with the same target",
    )
    parser.add_argument(
        "--min-idle",
        type=_number,
        default=0,
        metavar="N",
        help="servers that stay idle next to the one that trains [default 0]",
    )
    parser.add_argument(
        "--quiet-s",
        type=_positive,
        default=5.0,
        metavar="S",
        help="seconds for which a server must be idle before it trains [default 5]",
    )
    parser.add_argument(
        "--interval-s",
        type=_positive,
        default=2.0,
        metavar="S",
        help="seconds between two looks at the servers [default 2]",
    )
    parser.add_argument(
        "--hold-s",
        type=_positive,
        default=60.0,
        metavar="S",
        help="seconds after which a server that must not train does so if it hears nothing "
        "[default 60]",
    )
    parser.add_argument(
        "--gather-mb",
        type=_count,
        default=64,
        metavar="N",
        help="MiB of recorded sequences that are moved between two looks [default 64]",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="end once one server has trained one round and all have its drafter",
    )
    add_access(parser)


VERBS = {
    "coordinate": DrafterVerb("train one drafter for several servers", _coordinate),
    "status": DrafterVerb("show the drafter of a running server and what it records", add_server),
    "export": DrafterVerb("write a drafter in the layout of another engine", _export, True),
    "init": DrafterVerb("write an untrained drafter for a target", _init),
    "train": DrafterVerb("train a drafter on recorded text, without a server", _train, True),
    "evaluate": DrafterVerb("replay recorded responses through drafters", add_evaluate, True),
}


def add_arguments(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], plain: Runner, strict: Runner
) -> None:
    """`plain` and `strict` make what runs a module; `strict` sets the environment of strict
    numerics before it is imported.
    """
    for name, verb in VERBS.items():
        parser = verbs.add_parser(
            name, help=verb.sentence, description=verb.sentence, allow_abbrev=False
        )
        verb.add(parser)
        run = strict if verb.loads_model else plain
        parser.set_defaults(run=run(f"tlt_server.drafter.{name}"), numerics="strict")


def _pair(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", type=Path, required=True, metavar="DIR", help="the target's model directory"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="drafter directory to write"
    )


def _seed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=_number, default=0, metavar="N", help="[default 0]")


def _count(text: str) -> int:
    return _number(text, 1)


def _width(text: str) -> int:
    return _number(text, 1, 1 << 20)


def _depth(text: str) -> int:
    return _number(text, 1, MAX_DEPTH)


def _number(text: str, least: int = 0, most: int = 1 << 30) -> int:
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return value
