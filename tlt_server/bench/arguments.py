"""Flags of the benches; light, because `tlt --help` imports it."""

from __future__ import annotations

import argparse
from pathlib import Path

MOST = 2**20  # tokens, rows, threads
MOST_BATCH = 4096  # requests at once


def add_arguments(parser: argparse.ArgumentParser, bench: str) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer and shorter responses")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="target model [directory; default the shipped pair's]",
    )
    parser.add_argument(
        "--drafter",
        metavar="DIR",
        help="drafter [directory | history | none; default the shipped pair's]",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="what computes [default cpu]"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of weights and KV [default float32 on a CPU, bfloat16 on a GPU]",
    )
    parser.add_argument(
        "--numerics",
        choices=("strict", "fast"),
        default="strict",
        help="how products add; exact then reports the rate of differing tokens [default strict]",
    )
    parser.add_argument(
        "--threads",
        type=_count,
        metavar="N",
        help="compute threads [default: processors this process may use]",
    )
    parser.add_argument(
        "--seed", type=_seed, default=0, metavar="N", help="seed of the first response [default 0]"
    )
    parser.add_argument(
        "--json",
        type=_file,
        metavar="FILE",
        help="also write the figures, with machine, versions and commit, as JSON",
    )
    parser.add_argument(
        "--commit", metavar="NAME", help="of the code that runs [default: what git says]"
    )
    _ADD.get(bench, lambda parser: None)(parser)


def _exact(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plant-fault",
        action="store_true",
        help="move logits by one ulp, to see the check turn red",
    )


def _decode(parser: argparse.ArgumentParser) -> None:
    _batches(parser, "1,8,32,64,256", "1,8")
    parser.add_argument(
        "--against",
        choices=("fast",),
        help="the same with these numerics, and prefill with both: the price of strict",
    )
    parser.add_argument(
        "--max-rows",
        type=_count,
        metavar="N",
        help="prompt rows of one step [default 4096 on a GPU, 512 on a CPU]",
    )


def _cycle(parser: argparse.ArgumentParser) -> None:
    _batches(parser, "1,8,32", "1,8")


def _graphs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-running",
        type=_count,
        default=0,
        metavar="N",
        help="sequences that decode at once [default the device's]",
    )
    parser.add_argument("--keys", action="store_true", help="also one line per graph")
    parser.add_argument(
        "--cold", action="store_true", help="with an empty Triton cache, in a directory of its own"
    )


def _batches(parser: argparse.ArgumentParser, full: str, quick: str) -> None:
    parser.add_argument(
        "--batch",
        type=_sizes,
        metavar="N,N,...",
        help=f"requests at once [default {full}; with --quick {quick}]",
    )
    parser.add_argument(
        "--context",
        type=_count,
        metavar="TOKENS",
        help="also one request behind a prompt of so many tokens",
    )
    parser.set_defaults(batches=(_sizes(full), _sizes(quick)))


def _count(text: str) -> int:
    return _whole(text, 1, MOST)


def _seed(text: str) -> int:
    return _whole(text, 0, 2**31)


def _whole(text: str, least: int, most: int) -> int:
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
    return int(text)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_whole(part, 1, MOST_BATCH) for part in text.split(","))


def _file(text: str) -> Path:
    """Looked at before anything is measured, so that no figures are lost."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written; name a file in a directory that exists"
        )
    return path


_ADD = {"exact": _exact, "decode": _decode, "cycle": _cycle, "graphs": _graphs}
