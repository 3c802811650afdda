"""LoRA adapters in PEFT's layout for the tiny models, and the same models with one merged in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    directory: Path,
    base: Path,
    seed: int,
    rank: int = 4,
    alpha: float = 8.0,
    targets: Iterable[str] = ALL,
    scale: float = 0.3,
    **fields: Any,
) -> Path:
    """Write a random adapter of the model in `base`."""
    targets, generator = tuple(targets), torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        if name.split(".")[-2] in targets and name.endswith(".weight"):
            prefix = "base_model.model." + name.removesuffix("weight")
            outputs, inputs = weight.shape
            for part, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
                tensors[f"{prefix}{part}.weight"] = scale * torch.randn(shape, generator=generator)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "bias": "none",
        "lora_dropout": 0.1,
        "use_dora": False,
        "modules_to_save": None,
        **fields,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def merged(base: Path, adapter: Path, directory: Path) -> Path:
    """Write the model with the adapter's scaled products added to its weights."""
    shutil.copytree(base, directory)
    config = json.loads((adapter / "adapter_config.json").read_text())
    root = config["r"] ** 0.5 if config.get("use_rslora") else config["r"]
    weights = load_file(base / "model.safetensors")
    pairs = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in pairs if ".lora_A." in name]:
        product = pairs[name.replace("lora_A", "lora_B")] @ pairs[name]
        own = name.removeprefix("base_model.model.").replace("lora_A.", "")
        weights[own] += config["lora_alpha"] / root * product
    save_file(weights, directory / "model.safetensors")
    return directory
