"""Pushes in parts, by disk: the folders of the parts and the calls that push them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.engine.pushing import Pushable, perturbed, small_request
from tests.engine.tiny import SHALLOW, write_eagle, write_target
from tests.engine.weight_cases import engine, serving
from tlt_server.engine.settings import EngineSettings
from tlt_server.wire.events import WeightReport

__all__ = ["engine"]  # a fixture

PARTS = 3


def write_parts(root: Path) -> Path:
    write_target(root / "base", shape=SHALLOW)
    write_eagle(root / "drafter", shape=SHALLOW)
    perturbed(root / "drafter", root / "new-drafter", 3)
    for seed in (1, 2):
        perturbed(root / "base", root / f"new{seed}", seed)
    for name in ("new1", "new2", "new-drafter"):
        tensors = load_file(root / name / "model.safetensors")
        names = sorted(tensors)
        for part in range(PARTS):
            folder = root / f"{name}-{part}"
            folder.mkdir()
            save_file(
                {tensor: tensors[tensor] for tensor in names[part::PARTS]},
                folder / "model.safetensors",
            )
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parts(tmp_path_factory.mktemp("parts"))


@pytest.fixture(scope="module")
def settings(root: Path) -> EngineSettings:
    return replace(serving(root), weight_channels="disk,broadcast")


def part(
    engine: Pushable, root: Path, name: str, number: int, version: str = "", **fields: object
) -> WeightReport:
    tensors = [
        {"name": tensor} for tensor in load_file(root / f"{name}-{number}" / "model.safetensors")
    ]
    return engine.push(root / f"{name}-{number}", version, partial=True, tensors=tensors, **fields)


def results(
    engine: Pushable, root: Path, name: str, numbers: range = range(PARTS), **fields: object
) -> list[str]:
    return [part(engine, root, name, number, **fields).result for number in numbers]


def speak(engine: Pushable) -> object:
    return engine.run(small_request(8))


def live_as(settings: EngineSettings, model: Path) -> dict[str, str]:
    return Pushable(replace(settings, model=str(model))).checksums()
