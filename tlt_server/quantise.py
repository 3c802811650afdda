"""`tlt quantise`: a target's checkpoint with its linear maps in FP8, in the published layout.

One tensor is quantised at a time and files are written one by one, so memory does not grow with the
model. What was written is read back before the directory appears.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from tlt_client.channels.checksums import xxh3
from tlt_client.channels.disk import write
from tlt_client.channels.tensors import raw
from tlt_client.quantise import quantise
from tlt_server.drafter.out import new_directory
from tlt_server.errors import ModelError
from tlt_server.models.config import ModelConfig, read_json
from tlt_server.models.loader import (
    check_files,
    check_finite,
    empty_target,
    read_tensors,
    scale_name,
    tensor_files,
    unread,
)
from tlt_server.models.numerics import Numerics
from tlt_server.models.quantization import Quantization
from tlt_server.models.shards import Stored, in_fp8

FILE_BYTES, MIB = 2 * 10**9, 2**20
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pth")


def run(arguments: argparse.Namespace) -> int:
    source, out = arguments.model, arguments.out
    if ModelConfig.read(source).quantization is not None:
        raise ModelError(f"{source} is in FP8 already; serve it, or name the bfloat16 checkpoint")
    parameters = _expected(source)
    files = tensor_files(source)
    before = sum(path.stat().st_size for path in {*files.values()})
    columns = TextColumn("quantising"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    console = Console(width=None if sys.stdout.isatty() else 150)
    with new_directory(out) as directory:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("", total=before)

            def told() -> Iterator[tuple[str, Tensor]]:
                for name, tensor, size in _quantised(files, parameters):
                    yield name, tensor
                    progress.update(task, advance=size)

            entries = write(told(), directory, FILE_BYTES)
        _copy_others(source, directory)
        config = read_json(source / "config.json")
        config["quantization_config"] = Quantization().described()
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _expected(directory)
        _read_back(directory, entries)
        after = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    maps = sum(in_fp8(stored) for stored in parameters.values())
    console.print(
        f"{out}: {maps} linear maps in FP8, {before / MIB:,.1f} MiB are now {after / MIB:,.1f}; "
        f"read back, all {len(entries)} tensors are as written",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def _expected(directory: Path) -> Mapping[str, Stored]:
    """Return the tensors of a directory's target in FP8, without storage, once its headers are
    checked.
    """
    config = ModelConfig.read(directory)
    with torch.device("meta"):
        served = replace(config, quantization=config.quantization or Quantization())
        model = empty_target(directory, numerics=Numerics("strict"), config=served)
    parameters = model.parameters()
    check_files(parameters, directory, ignored=unread(config))
    return parameters


def _quantised(
    files: Mapping[str, Path], parameters: Mapping[str, Stored]
) -> Iterator[tuple[str, Tensor, int]]:
    """Yield each tensor of the new checkpoint, with the bytes that were read for it."""
    for path in sorted({*files.values()}):
        names = sorted(name for name, file in files.items() if file == path)
        for name, tensor in read_tensors(path, names):
            check_finite(name, tensor, path)
            if name in parameters and in_fp8(parameters[name]):
                values, scales = quantise(tensor)
                yield name, values, tensor.nbytes
                yield scale_name(name), scales, 0
            else:
                yield name, tensor, tensor.nbytes


def _copy_others(source: Path, directory: Path) -> None:
    """Copy the files next to the weights, such as the tokenizer's."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not any(path.match(pattern) for pattern in WEIGHTS):
            shutil.copy(path, directory)


def _read_back(directory: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    files = tensor_files(directory)
    for entry in entries:
        ((name, tensor),) = read_tensors(files[entry["name"]], [entry["name"]])
        if xxh3(raw(tensor)) != entry["checksum"]:
            raise ModelError(
                f"{files[name]}: tensor {name!r} is not as it was written; check the disk, and "
                "write the checkpoint again"
            )
