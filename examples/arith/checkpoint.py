"""Resumable training state: one safetensors file (parameters, AdamW moments) and one JSON file
(step, seconds, figures). No pickle.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn


def save_state(
    directory: Path, model: nn.Module, optimizer: torch.optim.AdamW, record: dict
) -> None:
    """Replace the checkpoint in `directory`; the JSON, written last, names the tensors' step."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"model.{name}": value.detach().cpu().contiguous()
        for name, value in model.state_dict().items()
    }
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {
            f"optimizer.{index}.{name}": value.detach().cpu().contiguous()
            for name, value in state.items()
        }
    for name, write in (
        ("state.safetensors", lambda path: save_file(tensors, path)),
        ("state.json", lambda path: path.write_text(json.dumps(record))),
    ):
        write(directory / f"{name}.part")
        os.replace(directory / f"{name}.part", directory / name)


def load_state(directory: Path, model: nn.Module, optimizer: torch.optim.AdamW) -> dict | None:
    """Restore in place; return the record, or None if there is no checkpoint."""
    if not (directory / "state.json").exists():
        return None
    tensors = load_file(directory / "state.safetensors")
    model.load_state_dict(
        {
            name.removeprefix("model."): value
            for name, value in tensors.items()
            if name.startswith("model.")
        }
    )
    restored = optimizer.state_dict()
    restored["state"] = {}
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, index, field = name.split(".", 2)
            restored["state"].setdefault(int(index), {})[field] = value
    optimizer.load_state_dict(restored)
    return json.loads((directory / "state.json").read_text())
