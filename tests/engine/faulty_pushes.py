"""A bench for faulty pushes: an engine, what it serves, and good weights to spoil."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.engine.pushing import Pushable, perturbed
from tests.engine.tiny import write_eagle, write_target
from tlt_server.engine.settings import EngineSettings
from tlt_server.events import WeightReport
from tlt_server.records import GenerateRequest, Sampling

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


REFUSED = ("weights_refused", "forbidden", "push_failed", "conflict")


EMBEDDING, QUERY, NORM = (
    "model.embed_tokens.weight",
    "model.layers.2.self_attn.q_proj.weight",
    "model.norm.weight",
)


class Bench:
    """The engine, what it serves, and a directory per case with a good copy of new weights to
    spoil.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.weights = root, root / "weights"
        self.weights.mkdir()
        write_target(root / "base")
        write_eagle(root / "drafter")
        perturbed(root / "base", root / "good", 1)
        perturbed(root / "drafter", root / "good-drafter", 2)
        self.engine = Pushable(
            EngineSettings(
                model=str(root / "base"),
                device="cpu",
                drafter=str(root / "drafter"),
                policy="off",
                kv_memory_mb=16,
                weight_root=str(self.weights),
            )
        )
        self.transaction = self.engine.engine.pushes.transaction
        self.said, self.sums = self.speak(), self.transaction.versions.live.live_sums()
        self.count = 0
        self.new_sums = self.engine.push(self.copy("good"), "good").checksums
        assert self.engine.roll_back().result == "rolled_back"

    def speak(self) -> Any:
        return self.engine.run(
            GenerateRequest(
                id="r",
                token_ids=[5, 6, 7],
                seed=3,
                sampling=Sampling(max_tokens=5, ignore_eos=True),
            )
        )

    def copy(self, name: str) -> Path:
        self.count += 1
        return Path(shutil.copytree(self.root / name, self.weights / f"case-{self.count}"))

    def check(self, report: WeightReport) -> None:
        """Old after a refusal, new after a success; then old again for the next case."""
        live = self.transaction.versions.live.live_sums()
        if report.result == "committed":
            assert {name: live[name] for name in self.new_sums} == self.new_sums
            assert self.engine.roll_back().result == "rolled_back"
            live = self.transaction.versions.live.live_sums()
        else:
            assert report.result in REFUSED and report.error and len(report.error[1]) > 20, report
        assert live == self.sums and self.speak() == self.said
        assert self.transaction.push is None and self.engine.engine.gate.state == "open"


def edit(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / FILE)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / FILE)


def header_size(directory: Path) -> int:
    with open(directory / FILE, "rb") as file:
        return int(struct.unpack("<Q", file.read(8))[0])


def shard(directory: Path, parts: int = 3) -> dict[str, str]:
    """The same tensors in several files with an index."""
    tensors = load_file(directory / FILE)
    names, weight_map = sorted(tensors), {}
    for i in range(parts):
        file = f"model-{i}.safetensors"
        save_file({name: tensors[name] for name in names[i::parts]}, directory / file)
        weight_map |= dict.fromkeys(names[i::parts], file)
    (directory / FILE).unlink()
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def declared(directory: Path, bench: Bench) -> list[dict[str, object]]:
    return [{"name": name, "checksum": value} for name, value in bench.new_sums.items()]


def outside(bench: Bench) -> Path:
    return bench.root / "good"  # next to the weight root
