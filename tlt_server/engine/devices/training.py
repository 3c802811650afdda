"""The device that the drafter is trained on, by the setting `drafter_training`.

A trainer replays what the server drafted and must find the server's own counts. Another kind of
device rounds otherwise, so the trainer has one of the engine's kind, or there is no start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from tlt_server.engine.devices.sizing import Drafting, training_share
from tlt_server.engine.settings import DecidedSettings, EngineSettings
from tlt_server.errors import StartupError
from tlt_server.process.machine import pipe_directory
from tlt_server.wire.kept import FORM, read_form

KIND = (
    "the self-check of a drafter repeats the server's own counts only on a device of the engine's "
    "kind"
)


class OtherGpu(NamedTuple):
    """A GPU that the engine does not compute on."""

    number: int
    name: str
    total_bytes: int

    @property
    def device(self) -> str:
        """Return its name for torch."""
        return f"cuda:{self.number}"


class Place(NamedTuple):
    """The engine's device, and what else the trainer could have."""

    device: str  # cpu or cuda
    gpu: str  # name of the engine's GPU
    mps: bool  # whether the engine is a client of MPS
    others: Sequence[OtherGpu]
    asked: str | None  # the setting drafter_training_device


def training_device(mode: str, place: Place) -> str:
    """Return the trainer's device: cuda is the engine's own GPU. `StartupError` where the mode has
    none.
    """
    return MODES[mode](place)


def with_form(
    settings: EngineSettings, decided: DecidedSettings, reasons: dict[str, str]
) -> tuple[DecidedSettings, dict[str, str]]:
    """Return both with the drafter in FP8, where auto is left the choice and the trainer has found
    that it may be.
    """
    drafter, state = settings.drafter_directory, settings.state_dir
    can = decided.device == "cuda" and decided.dtype == "bfloat16"
    if settings.drafter_quantization is not None or drafter is None or state is None or not can:
        return decided, reasons
    if (form := read_form(Path(state) / FORM, drafter)) is None:
        return decided, reasons
    said = f"fp8: in replays it lost {form.lost:.1%} of the accept length"
    decided = replace(decided, drafter_quantization="fp8")
    return decided, {**reasons, "drafter_quantization": said}


def describe_share(settings: DecidedSettings, drafter: Drafting) -> str:
    """Describe the memory of a GPU engine's trainer. `StartupError` where it has too little."""
    device = settings.drafter_training_device
    room = torch.cuda.get_device_properties(device).total_memory if settings.trains_apart else None
    return training_share(settings, drafter, room).describe(device)


def _own(place: Place) -> str:
    return place.device


def _shared(place: Place) -> str:
    if place.device == "cuda" and not place.mps:
        raise StartupError(
            "drafter_training is share, but the driver says that MPS is not on for this process, "
            "and without it two processes that run kernels on one GPU halve the engine; start "
            "nvidia-cuda-mps-control -d as this user, before the server and with its "
            f"CUDA_MPS_PIPE_DIRECTORY (now {pipe_directory()}), or use drafter_training idle"
        )
    return place.device


def _apart(place: Place) -> str:
    if place.device != "cuda":
        if place.asked in (None, place.device):
            return place.device
        raise _refused(place, f"the engine computes on {place.device}, and {KIND}")
    if place.asked == "cpu":
        raise _refused(place, f"the engine computes on a GPU, and {KIND}")
    alike = {other.device: other for other in place.others if other.name == place.gpu}
    if place.asked is None and alike:
        return next(iter(alike))
    if place.asked in alike:
        return place.asked
    seen = ", ".join(f"{other.device} {other.name}" for other in place.others) or "none"
    asked = f"{place.asked} is no other" if place.asked else "there is no other"
    raise _refused(place, f"{asked} {place.gpu} next to the engine's (seen: {seen}), and {KIND}")


def _refused(place: Place, reason: str) -> StartupError:
    suited = "another GPU of the engine's kind" if place.device == "cuda" else "cpu"
    asked = place.asked or "auto"
    return StartupError(
        f"drafter_training is device and drafter_training_device {asked}, but {reason}; name "
        f"{suited} there (CUDA_VISIBLE_DEVICES says which GPUs are seen), or use drafter_training "
        "idle"
    )


MODES: dict[str, Callable[[Place], str]] = {
    "off": _own,
    "idle": _own,
    "share": _shared,
    "device": _apart,
}
