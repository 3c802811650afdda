"""Flags of `tlt bench pad`."""

from __future__ import annotations

import argparse
from pathlib import Path

from tlt_server.bench.padding.shapes import SHAPES


def add_pad(parser: argparse.ArgumentParser) -> None:
    parser.description = PAD
    parser.epilog = PAD_EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--shape", required=True, choices=SHAPES, help="sizes of the large model")
    parser.add_argument(
        "--out",
        required=True,
        type=Path,
        metavar="DIR",
        help="gets DIR/target and DIR/drafter, new or empty",
    )
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float32"),
        help="dtype of all weights [default bfloat16, which rounds norm weights once more; "
        "float32: logits within 1e-4]",
    )
    parser.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help="layers of the target instead of the shape's; at least the small target's",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the extra weights [default 0]"
    )
    parser.add_argument(
        "--device",
        default="cpu",
        metavar="NAME",
        help="where random numbers are made, e.g. cuda, which is faster [default cpu]",
    )
    parser.add_argument(
        "--target", type=Path, metavar="DIR", help="small target [default the shipped pair's]"
    )
    parser.add_argument(
        "--drafter",
        type=Path,
        metavar="DIR",
        help="its EAGLE-3 drafter [default the shipped pair's]",
    )


PAD = """\
Embed a small trained pair (target and EAGLE-3 drafter) in the shapes of a large model.

The result has the large model's tensor names, shapes and dtypes, so a step costs what the large
model's step costs. It says what the small pair says, so acceptance is that of a trained drafter on
real answers; it may be higher than a large model's on harder text. The extra weights are random,
not zero. Use it to measure speculative decoding where no large weights are at hand, with this
server or any other engine that loads Hugging Face and EAGLE-3 checkpoints.
"""
PAD_EXAMPLES = """\
examples:
  tlt bench pad --shape mid --out /tmp/mid                  small enough for a laptop's CPU
  tlt bench pad --shape qwen2.5-7b --out /data/padded-7b    15.2 GB target, 0.8 GB drafter
  tlt serve --model /tmp/mid/target --drafter /tmp/mid/drafter

what fits: a Qwen2 or Llama target whose head width is the shape's. A Llama shape gets attention
biases if the small model has some (the shipped pair does). Qwen3 shapes are impossible: their query
and key norms cannot be undone. Prompts are the small pair's: the shipped pair does written-out
arithmetic, see tlt_server/demo/pair/README.md.
"""
