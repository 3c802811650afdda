"""Flags of the benches; light, because `tlt --help` imports it."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer and shorter responses")
    parser.add_argument("--model", type=Path, metavar="DIR", help="target model [directory; default the shipped pair's]")
    parser.add_argument("--drafter", metavar="DIR", help="drafter [directory | history; default the shipped pair's]")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what computes [default cpu]")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of weights and KV [default float32 on a CPU, bfloat16 on a GPU]")
    parser.add_argument("--numerics", choices=("strict", "fast"), default="strict", help="decode, cycle: how products add [default strict]")
    parser.add_argument("--threads", type=int, metavar="N", help="compute threads [default: processors this process may use]")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the first response [default 0]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    parser.add_argument("--plant-fault", action="store_true", help="exact: move one logit by one ulp, to see the check turn red")
