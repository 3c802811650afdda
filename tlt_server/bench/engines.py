"""Engines in a bench's own process, one after another: weights stay loaded, memory is freed.

One engine at a time: drop the previous one, then call `release`, so that the next finds the memory
free.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Sequence

import msgspec
import torch

from tlt_server.engine.devices import Device, Equipment, Memory, RunnerSetup, make_device
from tlt_server.engine.loop import Engine
from tlt_server.engine.settings import DecidedSettings
from tlt_server.errors import from_code
from tlt_server.models.config import ModelConfig
from tlt_server.weights.parts import Changed, Live
from tlt_server.wire.commands import SetPolicy
from tlt_server.wire.fingerprint import Fingerprint
from tlt_server.wire.records import GenerateRequest, Strategy

POLL_S = 0.005  # between two parts of a preparation


def release() -> None:
    """Free engines without references."""
    for _ in range(3):  # ranks are garbage only once models are, and what they held after that
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def adopt(engine: Engine, policy: SetPolicy) -> None:
    """Activate a policy in an idle engine, once its kernels are prepared. Raises the engine's
    error.
    """
    engine.send(msgspec.structs.replace(policy, id="policy"))
    while not (reports := engine.control_reports()):
        engine.step()
        if engine.choice.changes.stage:
            time.sleep(POLL_S)
    for report in reports:
        if report.error:
            raise from_code(*report.error)


def renamed(requests: list[GenerateRequest], turn: str) -> list[GenerateRequest]:
    """The same requests as new ones: other ids and groups, and a salt of their own, so that no run
    profits from an earlier one.
    """
    return [
        msgspec.structs.replace(r, id=f"{r.id}/{turn}", group_id=f"{r.group_id}/{turn}", salt=turn)
        for r in requests
    ]


class LoadedOnce:
    """Creates devices that share one copy of the weights, loaded by the first engine. Only adapters
    may be pushed to such engines. They also prepare `strategies`, in addition to those of their
    policy.
    """

    def __init__(self, strategies: Sequence[Strategy] = ()) -> None:
        self.live: Live | None = None
        # The self-test of the device that loaded the weights has chosen how all of them multiply.
        self.loader: Device | None = None
        self.strategies = strategies

    def device(self, settings: DecidedSettings) -> Device:
        return _Shared(make_device(settings), self)


class ReadyFor:
    """A device that also prepares `strategies`, in addition to those of its engine's policy."""

    def __init__(self, device: Device, strategies: Sequence[Strategy]) -> None:
        self._device, self._strategies = device, strategies
        self.name, self.warms_up, self.device = device.name, device.warms_up, device.device
        self.sizes, self.recordings = device.sizes, device.recordings
        self.compile, self.free = device.compile, device.free

    @property
    def numerics(self) -> str:
        return self._device.numerics

    @property
    def fingerprint(self) -> Fingerprint:
        return self._device.fingerprint

    def load(self, config: ModelConfig) -> Live:
        return self._device.load(config)

    def allocate(self, live: Live, max_model_len: int) -> Memory:
        return self._device.allocate(live, max_model_len)

    def equip(self, setup: RunnerSetup) -> Equipment:
        def wider(requests: range, *, prompts: bool) -> Iterable[Strategy]:
            return (*setup.reach(requests, prompts=prompts), *self._strategies)

        return self._device.equip(setup._replace(reach=wider))


class _Shared(ReadyFor):
    """A device whose weights may already be loaded."""

    def __init__(self, device: Device, source: LoadedOnce) -> None:
        super().__init__(device, source.strategies)
        self._source = source

    @property
    def numerics(self) -> str:
        return (self._source.loader or self._device).numerics

    @property
    def fingerprint(self) -> Fingerprint:
        loader = self._source.loader or self._device
        return msgspec.structs.replace(
            self._device.fingerprint, numerics=loader.fingerprint.numerics
        )

    def load(self, config: ModelConfig) -> Live:
        if self._source.live is None:
            self._source.live, self._source.loader = self._device.load(config), self._device
        return self._source.live

    def equip(self, setup: RunnerSetup) -> Equipment:
        equipment = super().equip(setup)
        install = equipment.install

        def checked(live: Live, changed: Changed) -> None:
            assert changed.role == "adapter", "weights that engines share do not change"
            install(live, changed)

        equipment.install = checked  # type: ignore[method-assign]
        return equipment
