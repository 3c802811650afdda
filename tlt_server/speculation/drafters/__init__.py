"""Drafters: sources of candidate tokens. Any candidates are lossless; good ones are fast.

A drafter is one file per kind of device and one record in `DRAFTERS`. The record holds all facts
that settings, policies and devices need before a drafter is made, so none of them refers to a
drafter by name. No torch here: implementations are named by strings and loaded by their device.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tlt_server.models.config import ModelConfig
from tlt_server.registry import load_object
from tlt_server.settings.server import QuantizationName

Rung = tuple[int, int, int]  # depth, children per node, verify rows per request


class Half(NamedTuple):
    """A drafter on one kind of device."""

    implementation: str  # "module:Class": a `cpu.CpuDrafter`, or an `engine.gpu.drafts.GpuDrafter`
    rungs: tuple[Rung, ...]  # arms of the policy beg, from the fewest rows to the most
    loader: str = ""  # "module:Class" of a drafter with weights: a `Loader`
    # What the policy goodput chooses from: lengths of draft paths, and children per node.
    depths: tuple[int, ...] = (1, 2, 3, 4, 5, 7, 10)
    widths: tuple[int, ...] = (1,)

    @property
    def deepest(self) -> int:
        """Return the longest draft path that a policy may request."""
        return max(*self.depths, *(depth for depth, _, _ in self.rungs))


class Declaration(NamedTuple):
    """Static facts about a drafter."""

    cpu: Half
    gpu: Half
    architectures: tuple[str, ...] = ()  # config.json's names of networks that it drafts with
    can_stand_in: bool = False  # drafts while a drafter with weights rests

    @property
    def needs_weights(self) -> bool:
        """Return True if `--drafter` selects this drafter by the directory of its network."""
        return bool(self.architectures)

    def half(self, device: str) -> Half:
        """Return the half for a device of `engine.devices.DEVICES`."""
        return self.cpu if device == "cpu" else self.gpu


DRAFTERS: dict[str, Declaration] = {
    "eagle": Declaration(
        Half(
            "tlt_server.speculation.drafters.eagle:Eagle",
            ((2, 1, 3), (4, 1, 5), (7, 1, 8)),
            "tlt_server.speculation.drafters.eagle:EagleLoader",
        ),
        Half(
            "tlt_server.engine.gpu.steps.drafts.eagle:EagleDrafts",
            tuple((depth, 4, rows) for rows in (8, 16, 32, 48) for depth in (4, 8)),
            "tlt_server.speculation.drafters.eagle:GpuEagleLoader",
            depths=(1, 2, 3, 5, 7, 10, 14, 20),
            widths=(1, 2, 4),
        ),
        architectures=(
            "LlamaForCausalLMEagle3",
            "Eagle3LlamaForCausalLM",
            "Eagle3Speculator",
            "Eagle3DraftModel",
            "LlamaForCausalLMEagle",
            "EagleLlamaForCausalLM",
        ),
    ),
    "history": Declaration(
        Half("tlt_server.speculation.drafters.history:History", ((2, 1, 3), (4, 1, 5), (7, 1, 8))),
        Half(
            "tlt_server.engine.gpu.steps.drafts.history:HistoryDrafts",
            ((7, 1, 8), (8, 2, 16), (8, 4, 32), (12, 4, 48)),
            depths=(3, 7, 14),
        ),
        can_stand_in=True,
    ),
}


def networked(drafters: Iterable[str]) -> str | None:
    """Return the one of these drafters that has a network."""
    return next((name for name in drafters if DRAFTERS[name].needs_weights), None)


def without_weights() -> tuple[str, ...]:
    """Return the drafters that `--drafter` takes by name."""
    return tuple(name for name, known in DRAFTERS.items() if not known.needs_weights)


def weights_directory(drafter: str) -> Path | None:
    """Return the directory named by the setting `--drafter`; None if the setting names none."""
    return None if drafter in ("none", *without_weights()) else Path(drafter)


def architecture_in(directory: Path) -> str | None:
    """Return the architecture in a directory's config.json; None unless it names exactly one."""
    try:
        named = json.loads((directory / "config.json").read_bytes())["architectures"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    single = named[0] if isinstance(named, list) and len(named) == 1 else None
    return single if isinstance(single, str) else None


def drafter_in(directory: Path) -> str:
    """Return the drafter for a weights directory, by the architecture in its config.json. An
    unknown architecture gets the first drafter, whose loader rejects the directory.
    """
    names = [name for name, known in DRAFTERS.items() if known.needs_weights]
    known = {architecture: name for name in names for architecture in DRAFTERS[name].architectures}
    return known.get(architecture_in(directory) or "", names[0])


def to_load(drafter: str) -> tuple[str, ...]:
    """Return the drafters to load for the setting `--drafter`.

    A name loads only that drafter. A directory loads the drafter of its weights, and all stand-ins.
    """
    if drafter == "none":
        return ()
    directory = weights_directory(drafter)
    if directory is None:
        return (drafter,)
    own = drafter_in(directory)
    return tuple(name for name, known in DRAFTERS.items() if name == own or known.can_stand_in)


class Loader(Protocol):
    """Loads a drafter's directory. `ModelError` if it cannot be used.

    A network is a `weights.parts.DrafterNetwork`, made for a target: on its device, with its
    numerics, and without storage if the target has none.
    """

    def feature_layers(self, directory: Path, target: ModelConfig) -> tuple[int, ...]:
        """Return the layers of the target whose inputs the drafter reads."""

    def empty(
        self, directory: Path, target: Any, *, quantization: QuantizationName = "none"
    ) -> Any:
        """Make the network of the directory's config with uninitialized storage. `quantization`: of
        its matrices but `fc`.
        """

    def fill(self, network: Any, directory: Path) -> None: ...

    def check(self, network: Any, directory: Path) -> None:
        """Reject files that `fill` would reject, and shapes without a kernel on the device. Reads
        no weight.
        """

    def calibration(self, directory: Path) -> object:
        """Return the `DraftWeights.calibration` of a directory."""

    def parse_calibration(self, content: bytes, source: str) -> object:
        """Parse the `calibration.json` of a push; `source` names it in errors."""


def find_loader(directory: Path, device: str) -> Loader:
    """Return the loader of a drafter's directory for a device of `engine.devices.DEVICES`."""
    loader: Loader = load_object(DRAFTERS[drafter_in(directory)].half(device).loader)()
    return loader
