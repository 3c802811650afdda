"""Drafters: where candidate tokens come from. Any answer is lossless; a good one is fast.

A drafter is one file per kind of device and one record in `DRAFTERS`. The record says everything
that settings, policies and devices must know before a drafter is made, so none of them asks for a
drafter by name. No torch here: the halves are named by strings and loaded by the device that
computes with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

Rung = tuple[int, int, int]  # depth, children per node, verify rows per request


class Half(NamedTuple):
    """A drafter on one kind of device."""

    implementation: str  # "module:Class": a `cpu.CpuDrafter`, or an `engine.gpu.drafts.GpuDrafter`
    rungs: tuple[Rung, ...]  # default strategies, from the fewest rows to the most


class Declaration(NamedTuple):
    """The facts known of a drafter before it is made."""

    cpu: Half
    gpu: Half
    needs_weights: bool = False  # drafts with a network, which `--drafter` names by its directory
    can_stand_in: bool = False  # drafts while a drafter with weights rests

    def half(self, device: str) -> Half:
        """Return the half for a device of `engine.devices.DEVICES`."""
        return self.cpu if device == "cpu" else self.gpu


DRAFTERS: dict[str, Declaration] = {
    "eagle": Declaration(
        Half("tlt_server.speculation.drafters.eagle:Eagle", ((2, 1, 3), (4, 1, 5), (7, 1, 8))),
        Half(
            "tlt_server.engine.gpu.drafts.eagle:EagleDrafts",
            ((2, 1, 3), (3, 1, 4), (7, 1, 8), (7, 4, 16), (7, 4, 32)),
        ),
        needs_weights=True,
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


def to_load(drafter: str) -> tuple[str, ...]:
    """Return the drafters to load for the setting `--drafter`.

    A name is that drafter alone. A directory is the drafter with weights, and all that can stand in
    for it.
    """
    if drafter == "none":
        return ()
    if weights_directory(drafter) is None:
        return (drafter,)
    return tuple(
        name for name, known in DRAFTERS.items() if known.needs_weights or known.can_stand_in
    )
