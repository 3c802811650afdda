"""The seam between devices and the checkpoint of a drafter with weights; `Half.loader` names an
implementation.

A network is made for a target: on its device, with its numerics, and without storage if the target
has none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from tlt_server.models.config import ModelConfig
from tlt_server.registry import load_object
from tlt_server.speculation.drafters import DRAFTERS, drafter_in


class Loader(Protocol):
    """Loads a drafter's directory. `ModelError` if it cannot be used. A network is a
    `weights.parts.DrafterNetwork`.
    """

    def feature_layers(self, directory: Path, target: ModelConfig) -> tuple[int, ...]:
        """Return the layers of the target whose inputs the drafter reads."""

    def empty(self, directory: Path, target: Any) -> Any:
        """Make the network of the directory's config with uninitialized storage."""

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
