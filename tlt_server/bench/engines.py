"""Engines of a bench's own process, one after another: weights that stay loaded from one to the
next, memory given back.

One engine at a time: drop the one before, then `release`, then the next finds the memory free.
"""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from tlt_server.engine.devices import Device, Equipped, Memory, OnProgress, Quiet, make_device
from tlt_server.engine.settings import DecidedSettings, EngineSettings
from tlt_server.models.config import ModelConfig
from tlt_server.speculation.policies.arms import Ladder
from tlt_server.weights.parts import Changed, Live


def release() -> None:
    """Take down engines that nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class LoadedOnce:
    """Makes devices that share one copy of the weights: the first engine loads it. Nothing may be
    pushed to such engines.
    """

    def __init__(self) -> None:
        self.live: Live | None = None

    def device(self, settings: DecidedSettings) -> Device:
        return _Shared(make_device(settings), settings, self)


class _Shared:
    """A device whose weights may be there already, and which prepares for the strategies in use,
    not for all there are.
    """

    def __init__(self, device: Device, settings: DecidedSettings, source: LoadedOnce) -> None:
        self._device, self._settings, self._source = device, settings, source
        self.name, self.warms_up, self.device, self.free = (
            device.name,
            device.warms_up,
            device.device,
            device.free,
        )

    @property
    def numerics(self) -> str:
        return self._device.numerics

    def load(self, config: ModelConfig) -> Live:
        if self._source.live is None:
            self._source.live = self._device.load(config)
        return self._source.live

    def allocate(self, live: Live, max_model_len: int) -> Memory:
        return self._device.allocate(live, max_model_len)

    def equip(
        self,
        live: Live,
        memory: Memory,
        ladder: Ladder,
        page_table_SP: NDArray[np.int32],
        on_progress: OnProgress,
        quiet: Quiet,
    ) -> Equipped:
        arms = reachable(ladder, self._settings)
        equipped = self._device.equip(live, memory, arms, page_table_SP, on_progress, quiet)
        return equipped._replace(install=_refuse)


def _refuse(live: Live, changed: Changed) -> None:
    raise AssertionError("weights that engines share do not change")


def reachable(ladder: Ladder, settings: EngineSettings) -> Ladder:
    """The arms that this policy may choose, a fixed one at every batch size."""
    if settings.policy == "off":
        return replace(ladder, arms=ladder.arms[:1])
    if settings.policy == "fixed" and settings.strategy is not None:
        return replace(
            ladder, arms=(ladder.arms[0], settings.strategy), rows=((1, settings.strategy.rows),)
        )
    return ladder
