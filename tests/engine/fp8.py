"""Checkpoints whose linear maps are in FP8, as a trainer writes them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.tiny import Shape
from tlt_client.channels.checksums import mix64
from tlt_client.quantise import SCALE_SUFFIX, effective_checksum, quantise
from tlt_server.models.quantization import FORM

# The smallest widths that blocks of 128 divide.
BLOCKS = Shape(vocab=64, hidden=128, layers=2, head_dim=64, mlp=128, features=(1, 0, 1))


def is_map(name: str) -> bool:
    return name.endswith("_proj.weight")


def in_halves(tensors: Mapping[str, Tensor], *, apart: bool = False) -> dict[str, Tensor]:
    """Return the checkpoint in FP8; `apart`: all scales after all values."""
    found: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if is_map(name):
            found[name], scales[name + SCALE_SUFFIX] = quantise(tensor)
        else:
            found[name] = tensor
        if not apart:
            found |= scales
            scales.clear()
    return found | scales


def effective_sums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return what a trainer computes of the version that a server in FP8 makes of this."""
    return {
        name: effective_checksum(tensor) if is_map(name) else mix64(tensor)
        for name, tensor in tensors.items()
    }


def save_in_fp8(source: Path, directory: Path) -> Path:
    """Write the checkpoint in the standard layout of FP8."""
    shutil.copytree(source, directory)
    save_file(in_halves(load_file(source / "model.safetensors")), directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": FORM}))
    return directory
