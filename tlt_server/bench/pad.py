"""`tlt bench pad`: embed a small trained pair (target and EAGLE-3 drafter) in the shapes of a large
model.

The result has the large model's tensor names, shapes and dtypes, so a step costs as much as the
large model's. Its outputs are the small pair's, so acceptance is that of a trained drafter on
real answers; it may be higher than a large model's on harder text. The extra weights are random,
not zero. Use it to measure speculative decoding where no large weights are at hand, with this
server or any other engine that loads Hugging Face and EAGLE-3 checkpoints. config.json comes last:
a directory that has one is complete.

    tlt bench pad --shape mid --out /tmp/mid                  small enough for a laptop's CPU
    tlt bench pad --shape qwen2.5-7b --out /data/padded-7b    15.2 GB target, 0.8 GB drafter
    tlt serve --model /tmp/mid/target --drafter /tmp/mid/drafter

A Qwen2 or Llama target fits whose head width is the shape's. A Llama shape gets attention biases if
the small model has some (the shipped pair does). Qwen3 shapes are impossible: their query and key
norms cannot be undone. Prompts are the small pair's: the shipped pair does written-out arithmetic,
see tlt_server/demo/pair/README.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from tlt_client.channels.disk import write as write_tensors
from tlt_server.bench.padding.recipe import Checkpoint, Named, Pair, pad
from tlt_server.bench.padding.shapes import SHAPES
from tlt_server.demo.workload import DRAFTER, TARGET
from tlt_server.errors import ModelError, StartupError

SHARD_BYTES = 2 * 10**9
OnTensor = Callable[[str, int], None]


def run(args: argparse.Namespace) -> int:
    shape = SHAPES[args.shape]
    if args.layers is not None:
        shape = replace(shape, layers=args.layers)
    dtype = getattr(torch, args.dtype)
    if why := unusable(args.device):
        raise StartupError(
            f"--device {args.device} cannot be used: {why}; "
            "use cpu, or cuda on a machine with a GPU"
        )
    target, drafter = args.target or TARGET, args.drafter or DRAFTER
    total = weight_bytes(pad(target, drafter, shape, dtype, device="meta"))
    check_room(args.out, total)
    pair = pad(target, drafter, shape, dtype, seed=args.seed, device=args.device)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    console = Console(width=None if sys.stdout.isatty() else 150)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("writing", total=total)
        write(
            pair,
            args.out,
            on_tensor=lambda name, size: progress.update(task, advance=size, description=name),
        )
    console.print(
        f"tlt serve --model {args.out}/target --drafter {args.out}/drafter",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def unusable(device: str) -> str:
    """Return the reason why no random number can be made and read on the device; empty if it
    works.
    """
    try:
        torch.empty(1, device=device).normal_().item()
    except (RuntimeError, AssertionError, ImportError) as error:  # a torch without CUDA asserts
        return str(error).splitlines()[0]
    return ""


def weight_bytes(pair: Pair) -> int:
    return sum(tensor.nbytes for checkpoint in pair for _, tensor in checkpoint.tensors())


def check_room(out: Path, needed: int) -> None:
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ModelError(
            f"{out} needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free there; "
            "choose another --out or fewer --layers"
        )


def write(
    pair: Pair,
    directory: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    on_tensor: OnTensor = lambda name, size: None,
) -> None:
    """Write `directory`/target and `directory`/drafter. `ModelError` if these exist. `on_tensor`:
    called with each name and size in bytes.
    """
    folders = {directory / part: checkpoint for part, checkpoint in pair._asdict().items()}
    for folder in folders:
        if folder.exists() and any(folder.iterdir()):
            raise ModelError(f"{folder} is not empty; remove it or choose another directory")
    for folder, checkpoint in folders.items():
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(_told(checkpoint, on_tensor), folder, shard_bytes)
        for path in sorted(checkpoint.source.iterdir()):
            if path.is_file() and path.name != "config.json" and not path.name.startswith("model"):
                shutil.copy(path, folder)
        (folder / "config.json").write_text(json.dumps(checkpoint.config, indent=2) + "\n")


def _told(checkpoint: Checkpoint, on_tensor: OnTensor) -> Named:
    for name, tensor in checkpoint.tensors():
        yield name, tensor
        on_tensor(name, tensor.nbytes)
