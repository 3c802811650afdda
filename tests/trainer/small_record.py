"""Keep a run of `--train norms` with drafters that were trained on it in about 1 MB, and read it
back.

    python -m tests.trainer.small_record RUN STATE/samples DRAFTERS OUT

A step's policy is the shipped target with other norms. A drafter is the shipped one plus a change
of low rank, which makes it a drafter of its own: it is replayed as it is read back.

Legend: S steps, W norms, H hidden; a change is U_OR @ V_RI.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tlt_server.demo.workload import DRAFTER, TARGET
from tlt_server.samples.segments import SUFFIX

FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
WEIGHTS, NORMS, DRAFTERS = "model.safetensors", "norms.safetensors", "drafters.safetensors"
RANK = 4


def keep(run: Path, samples: Path, drafters: Path, out: Path) -> None:
    """Write norms of all steps, changes of all drafters, and the server's segments."""
    out.mkdir(parents=True, exist_ok=True)
    steps = sorted((run / "weights").iterdir())[:-1]  # nothing was said by the last one
    norms = [load_file(step / WEIGHTS) for step in steps]
    names = sorted(name for name in norms[0] if "norm" in name)
    norms_SWH = torch.stack([torch.stack([each[name] for name in names]) for each in norms])
    save_file({"norms_SWH": norms_SWH}, out / NORMS)
    shipped, changes = load_file(DRAFTER / WEIGHTS), dict[str, Tensor]()
    for directory in sorted(drafters.iterdir()):
        for name, value in load_file(directory / WEIGHTS).items():
            change = value.float() - shipped[name].float()
            if not change.any():
                continue
            if change.ndim == 2:
                left, scale, right = torch.linalg.svd(change, full_matrices=False)
                changes[f"{directory.name}/{name}/U_OR"] = (left * scale)[:, :RANK].half()
                changes[f"{directory.name}/{name}/V_RI"] = right[:RANK].half()
            else:
                changes[f"{directory.name}/{name}"] = change.half()
    save_file({name: value.contiguous() for name, value in changes.items()}, out / DRAFTERS)
    for path in sorted(samples.glob(f"*{SUFFIX}")):
        shutil.copy(path, out)


def target_of(record: Path, step: int, directory: Path) -> Path:
    """Write the policy before a step as a model directory."""
    norms_WH = load_file(record / NORMS)["norms_SWH"][step]
    directory.mkdir(parents=True)
    for name in FILES:
        shutil.copy(TARGET / name, directory)
    weights = load_file(TARGET / WEIGHTS)
    names = sorted(name for name in weights if "norm" in name)
    for name, norm_H in zip(names, norms_WH, strict=True):
        weights[name] = norm_H
    weights = {name: value.float() for name, value in weights.items()}  # as they were pushed
    save_file(weights, directory / WEIGHTS, {"format": "pt"})
    return directory


def drafter_of(record: Path, name: str, directory: Path) -> Path:
    """Write one of the record's drafters as a drafter directory."""
    directory.mkdir(parents=True)
    for file in DRAFTER.iterdir():
        if file.name != WEIGHTS:
            shutil.copy(file, directory)
    weights, changes = load_file(DRAFTER / WEIGHTS), load_file(record / DRAFTERS)
    for own, value in weights.items():
        change = changes.get(f"{name}/{own}")
        if change is None and f"{name}/{own}/U_OR" in changes:
            left_OR, right_RI = (changes[f"{name}/{own}/{part}"] for part in ("U_OR", "V_RI"))
            change = left_OR.double() @ right_RI.double()
        if change is not None:
            weights[own] = (value.double() + change.double()).to(value.dtype)
    save_file(weights, directory / WEIGHTS, {"format": "pt"})
    return directory


if __name__ == "__main__":
    keep(*map(Path, sys.argv[1:]))
