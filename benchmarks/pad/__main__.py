"""`python -m benchmarks.pad`: write a padded pair as checkpoints."""

from __future__ import annotations

import argparse
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.pad import SHAPES, Pair, pad, write
from tlt_server.demo.workload import DRAFTER, TARGET
from tlt_server.errors import ModelError

DESCRIPTION = """\
Embed a small trained pair (target and EAGLE-3 drafter) in the shapes of a large model.

The result has the large model's tensor names, shapes and dtypes, so a step costs what the large model's step
costs, and says what the small pair says, so the acceptance is that of a trained drafter on real answers: the small
pair's, which may be higher than a large model's on harder text. The extra weights are random, not zero. Use it to
measure speculative decoding where no large weights are at hand, with this server or any other engine that loads
Hugging Face and EAGLE-3 checkpoints.
"""
EXAMPLES = """\
examples:
  python -m benchmarks.pad --shape mid --out /tmp/mid                  small enough for a laptop's CPU
  python -m benchmarks.pad --shape qwen2.5-7b --out /data/padded-7b    15.2 GB target, 0.8 GB drafter
  tlt serve --model /tmp/mid/target --drafter /tmp/mid/drafter

what fits: a Qwen2 or Llama target whose head width is the shape's. A Llama shape gets attention biases if the small
model has some (the shipped pair does). Qwen3 shapes cannot be had: their query and key norms cannot be undone.
Prompts are the small pair's: the shipped one does written-out arithmetic, see tlt_server/demo/pair/README.md.
"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "python -m benchmarks.pad",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--shape", required=True, choices=SHAPES, help="sizes of the large model")
    p.add_argument(
        "--out",
        required=True,
        type=Path,
        metavar="DIR",
        help="gets DIR/target and DIR/drafter, new or empty",
    )
    p.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float32"),
        help="of all weights [default bfloat16, which rounds norm weights once more; float32: logits within 1e-4]",
    )
    p.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help="layers of the target instead of the shape's; at least the small target's",
    )
    p.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the extra weights [default 0]"
    )
    p.add_argument(
        "--device",
        default="cpu",
        metavar="NAME",
        help="where random numbers are made, e.g. cuda: faster [default cpu]",
    )
    p.add_argument(
        "--target",
        type=Path,
        default=TARGET,
        metavar="DIR",
        help="small target [default the shipped pair's]",
    )
    p.add_argument(
        "--drafter",
        type=Path,
        default=DRAFTER,
        metavar="DIR",
        help="its EAGLE-3 drafter [default the shipped pair's]",
    )
    return p


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    shape = (
        SHAPES[args.shape]
        if args.layers is None
        else replace(SHAPES[args.shape], layers=args.layers)
    )
    dtype = getattr(torch, args.dtype)
    if why := unusable(args.device):
        print(
            f"benchmarks.pad: --device {args.device} cannot be used: {why}; use cpu, or cuda on a machine with a GPU",
            file=sys.stderr,
        )
        return 2
    console = Console(width=None if sys.stdout.isatty() else 150)
    try:
        total = weight_bytes(pad(args.target, args.drafter, shape, dtype, device="meta"))
        check_room(args.out, total)
        pair = pad(args.target, args.drafter, shape, dtype, seed=args.seed, device=args.device)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("writing", total=total)
            write(
                pair,
                args.out,
                on_tensor=lambda name, size: progress.update(task, advance=size, description=name),
            )
    except ModelError as error:
        print(f"benchmarks.pad: {error.message}", file=sys.stderr)
        return 1
    console.print(
        f"tlt serve --model {args.out}/target --drafter {args.out}/drafter",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def unusable(device: str) -> str:
    """Why no random number can be made there and read; empty: it can."""
    try:
        torch.empty(1, device=device).normal_().item()
    except (
        RuntimeError,
        AssertionError,
        ImportError,
    ) as error:  # AssertionError: what a torch without CUDA raises
        return str(error).splitlines()[0]
    return ""


def weight_bytes(pair: Pair) -> int:
    return sum(tensor.nbytes for checkpoint in pair for _, tensor in checkpoint.tensors())


def check_room(out: Path, needed: int) -> None:
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ModelError(
            f"{out} needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free there; choose another --out or fewer --layers"
        )


if __name__ == "__main__":
    sys.exit(main())
