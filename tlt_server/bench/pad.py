"""`tlt bench pad`: write a padded pair as checkpoints."""

from __future__ import annotations

import argparse
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from tlt_server.bench.padding.checkpoint import write
from tlt_server.bench.padding.recipe import Pair, pad
from tlt_server.bench.padding.shapes import SHAPES
from tlt_server.demo.workload import DRAFTER, TARGET
from tlt_server.errors import ModelError, StartupError


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
    """Return why no random number can be made and read on the device; empty if it can."""
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
