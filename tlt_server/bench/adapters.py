"""Random LoRA adapters for benches, in PEFT's layout, and engines that have them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from tlt_server.bench.exact_plan import ADAPTERS
from tlt_server.engine.loop import Engine
from tlt_server.models.adapters import BLOCKS, AdapterConfig, AdapterWeights
from tlt_server.models.config import ModelConfig
from tlt_server.wire.commands import Manifest, PushWeights, RollbackWeights

RANK = 8
EFFECT = 0.05  # size of the added output, relative to the input


def write_adapters(model: Path, root: Path, largest: int = RANK) -> None:
    """Write an adapter of the model for each name, each of one rank less than the previous one."""
    config = ModelConfig.read(model)
    for seed, name in enumerate(ADAPTERS[1:]):
        generator = torch.Generator().manual_seed(seed)
        rank = largest - seed
        adapter = AdapterConfig(rank, 1.0, frozenset(BLOCKS))
        maps = adapter.maps([], config.layers)
        weights = AdapterWeights(config, adapter, torch.float32, maps)
        for _, _, (a_rK, b_Nr) in weights.pairs():
            a_rK.normal_(0, a_rK.shape[1] ** -0.5, generator=generator)
            b_Nr.normal_(0, EFFECT * rank**-0.5, generator=generator)
        directory = root / name
        directory.mkdir()
        save_file(weights.parameters(), directory / "adapter_model.safetensors")
        said = {"r": rank, "lora_alpha": rank, "target_modules": [*BLOCKS]}
        (directory / "adapter_config.json").write_text(json.dumps(said))


def load_adapters(engine: Engine) -> None:
    """Push every adapter to an idle engine, from below its weight root."""
    for name in ADAPTERS[1:]:
        pushed(engine, PushWeights(name, Manifest(role="adapter", adapter=name, path=name)))


def pushed(engine: Engine, command: PushWeights | RollbackWeights) -> None:
    """Step an idle engine until it has installed other weights."""
    engine.send(command)
    while not (reports := engine.reports()):
        engine.step()
        time.sleep(0.001)
    assert [report.error for report in reports] == [None]
