"""Drafters: where candidate tokens come from. Any answer is lossless; a good one is fast.

A drafter is one file per kind of device and one record in `DRAFTERS`. The record says everything
that settings, policies and devices must know before a drafter is made, so none of them asks for a
drafter by name. No torch here: the halves are named by strings and loaded by the device that
computes with them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

Rung = tuple[int, int, int]  # depth, children per node, verify rows per request


class Half(NamedTuple):
    """A drafter on one kind of device."""

    implementation: str  # "module:Class": a `cpu.CpuDrafter`, or an `engine.gpu.drafts.GpuDrafter`
    rungs: tuple[Rung, ...]  # default strategies, from the fewest rows to the most
    loader: str = ""  # "module:Class" of a drafter with weights: a `loading.Loader`
    # What the policy goodput chooses from: lengths of draft paths, and children per node.
    depths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7)
    widths: tuple[int, ...] = (1,)


class Declaration(NamedTuple):
    """The facts known of a drafter before it is made."""

    cpu: Half
    gpu: Half
    architecture: str = ""  # config.json's name of the network that it drafts with
    can_stand_in: bool = False  # drafts while a drafter with weights rests

    @property
    def needs_weights(self) -> bool:
        """Tell whether `--drafter` names it by a directory, which holds its network."""
        return bool(self.architecture)

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
            "tlt_server.engine.gpu.drafts.eagle:EagleDrafts",
            ((2, 1, 3), (3, 1, 4), (7, 1, 8), (7, 4, 16), (7, 4, 32)),
            "tlt_server.engine.gpu.drafts.eagle:GpuEagleLoader",
        ),
        architecture="LlamaForCausalLMEagle3",
    ),
    "history": Declaration(
        Half("tlt_server.speculation.drafters.history:History", ((2, 1, 3), (7, 1, 8))),
        Half(
            "tlt_server.engine.gpu.drafts.history:HistoryDrafts",
            ((3, 1, 4), (7, 1, 8), (12, 2, 16)),
        ),
        can_stand_in=True,
    ),
}


def without_weights() -> tuple[str, ...]:
    """Return the drafters that `--drafter` takes by name."""
    return tuple(name for name, known in DRAFTERS.items() if not known.needs_weights)


def weights_directory(drafter: str) -> Path | None:
    """Return the directory that the setting `--drafter` names; None where it names none."""
    return None if drafter in ("none", *without_weights()) else Path(drafter)


def drafter_in(directory: Path) -> str:
    """Return the drafter whose weights a directory holds, by the architecture in its config.json.
    Without a known one it is the first, whose loader refuses the directory.
    """
    try:
        named = json.loads((directory / "config.json").read_bytes())["architectures"]
    except (OSError, ValueError, LookupError, TypeError):
        named = None
    names = [name for name, known in DRAFTERS.items() if known.needs_weights]
    return next((name for name in names if [DRAFTERS[name].architecture] == named), names[0])


def to_load(drafter: str) -> tuple[str, ...]:
    """Return the drafters to load for the setting `--drafter`.

    A name is that drafter alone. A directory is the drafter whose weights it holds, and all that
    can stand in for it.
    """
    if drafter == "none":
        return ()
    directory = weights_directory(drafter)
    if directory is None:
        return (drafter,)
    own = drafter_in(directory)
    return tuple(name for name, known in DRAFTERS.items() if name == own or known.can_stand_in)
