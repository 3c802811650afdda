"""Flags of the benches; light, because `tlt --help` imports it."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser, bench: str) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer and shorter responses")
    parser.add_argument("--model", type=Path, metavar="DIR", help="target model [directory; default the shipped pair's]")
    parser.add_argument("--drafter", metavar="DIR", help="drafter [directory | history | none; default the shipped pair's]")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what computes [default cpu]")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of weights and KV [default float32 on a CPU, bfloat16 on a GPU]")
    parser.add_argument("--numerics", choices=("strict", "fast"), default="strict",
                        help="how products add; exact then reports the rate of differing tokens [default strict]")
    parser.add_argument("--threads", type=int, metavar="N", help="compute threads [default: processors this process may use]")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the first response [default 0]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures, with machine, versions and commit, as JSON")
    parser.add_argument("--commit", metavar="NAME", help="of the code that runs [default: what git says]")
    _ADD.get(bench, lambda parser: None)(parser)


def _exact(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plant-fault", action="store_true", help="move logits by one ulp, to see the check turn red")


def _decode(parser: argparse.ArgumentParser) -> None:
    _batches(parser, "1,8,32,64,256", "1,8")
    parser.add_argument("--against", choices=("fast",), help="the same with these numerics, and prefill with both: the price of strict")
    parser.add_argument("--max-rows", type=int, metavar="N", help="prompt rows of one step [default 4096 on a GPU, 512 on a CPU]")


def _cycle(parser: argparse.ArgumentParser) -> None:
    _batches(parser, "1,8,32", "1,8")


def _graphs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-running", type=int, default=64, metavar="N", help="sequences that decode at once [default 64]")
    parser.add_argument("--keys", action="store_true", help="also one line per graph")
    parser.add_argument("--cold", action="store_true", help="with an empty Triton cache, in a directory of its own")


def _batches(parser: argparse.ArgumentParser, full: str, quick: str) -> None:
    parser.add_argument("--batch", type=_sizes, metavar="N,N,...", help=f"requests at once [default {full}; with --quick {quick}]")
    parser.add_argument("--context", type=int, metavar="TOKENS", help="also one request behind a prompt of so many tokens")
    parser.set_defaults(batches=(_sizes(full), _sizes(quick)))


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split(","))
    if min(sizes) < 1:
        raise ValueError(text)
    return sizes


_ADD = {"exact": _exact, "decode": _decode, "cycle": _cycle, "graphs": _graphs}
