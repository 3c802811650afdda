"""A small trained pair inside the shapes of a large one: real acceptance at real cost, where no
large weights are at hand.

`pad(target, drafter, SHAPES["qwen2.5-7b"], torch.bfloat16)` gives the recipe of a target and an
EAGLE-3 drafter whose tensors have the large model's names, shapes and dtypes, and whose outputs are
the small pair's; build it in memory, on any device, or `write` it as ordinary checkpoints that
other engines load too. `recipe` says why the outputs are the same. Command: `python -m
benchmarks.pad`.
"""

from benchmarks.pad.checkpoint import write
from benchmarks.pad.recipe import Checkpoint, Pair, pad
from benchmarks.pad.shapes import SHAPES, Shape

__all__ = ["SHAPES", "Checkpoint", "Pair", "Shape", "pad", "write"]
