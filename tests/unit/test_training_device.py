"""The device that the drafter is trained on: what each mode takes, and what it refuses."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import pytest

from tests.unit.test_choice import CARD, NONE, chosen
from tlt_server.engine.devices.training import OtherGpu
from tlt_server.errors import StartupError
from tlt_server.process import machine
from tlt_server.process.machine import client_environment, mps_enabled
from tlt_server.samples.activity import REASONS
from tlt_server.trainer.process.main import visible
from tlt_server.trainer.process.schedule import MODES

TWIN, OLDER = OtherGpu(2, CARD.name, 80 * 2**30), OtherGpu(1, "Card 8000", 40 * 2**30)
BOTH = CARD._replace(others=(OLDER, TWIN))
HALVED = "halve the engine; start nvidia-cuda-mps-control -d as this user"


class Case(NamedTuple):
    gpu: Any
    device: str  # the engine's
    mode: str
    asked: str | None
    found: str  # the trainer's device, or a part of the refusal


CASES = [
    Case(NONE, "cpu", "idle", None, "cpu"),
    Case(NONE, "cpu", "share", None, "cpu"),
    Case(NONE, "cpu", "device", None, "cpu"),
    Case(NONE, "cpu", "device", "cpu", "cpu"),
    Case(BOTH, "cuda", "idle", None, "cuda"),
    Case(BOTH._replace(mps=True), "cuda", "share", None, "cuda"),
    Case(BOTH, "cuda", "device", None, "cuda:2"),
    Case(BOTH, "cuda", "device", "cuda:2", "cuda:2"),
    Case(BOTH, "cuda", "share", None, HALVED),
    Case(CARD, "cuda", "device", None, "there is no other Card 9000 next to the engine's (seen: n"),
    Case(BOTH, "cuda", "device", "cuda:1", "cuda:1 is no other Card 9000 .* cuda:1 Card 8000, cud"),
    Case(BOTH, "cuda", "device", "cuda:0", "cuda:0 is no other Card 9000 next to the engine's"),
    Case(BOTH, "cuda", "device", "cpu", "on a GPU, and the self-check .* name another GPU"),
    Case(BOTH, "cpu", "device", "cuda:2", "on cpu, and the self-check .* name cpu there"),
]


@pytest.mark.parametrize("case", CASES)
def test_each_training_mode_finds_a_device_or_names_the_remedy(case: Case) -> None:
    settings = {"drafter_training": case.mode, "drafter_training_device": case.asked}
    if case.found in ("cpu", "cuda", "cuda:2"):
        found, reasons = chosen(case.gpu, device=case.device, **settings)
        assert found.drafter_training_device == case.found
        named = case.mode == "device" and case.asked is None
        assert ("drafter_training_device" in reasons) == named
        return
    with pytest.raises(StartupError, match=case.found.replace("(", r"\(")) as caught:
        chosen(case.gpu, device=case.device, **settings)
    assert "or use drafter_training idle" in caught.value.message


class Driver:
    """A libcuda that answers with these codes; `enabled` is its attribute of MPS."""

    def __init__(self, enabled: int, unknown: int = 0) -> None:
        self.enabled, self.unknown = enabled, unknown

    def cuInit(self, flags: int) -> int:  # noqa: N802 (the driver's name)
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> int:  # noqa: N802
        return number

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:  # noqa: N802
        assert attribute == 133
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = self.enabled
        return self.unknown


@pytest.mark.parametrize(
    ("driver", "enabled"), [(Driver(1), True), (Driver(0), False), (Driver(1, unknown=1), False)]
)
def test_mps_state_is_read_from_the_driver(
    driver: Driver, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: driver)
    assert mps_enabled() is enabled


def test_mps_counts_as_off_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(machine.ctypes, "CDLL", absent)
    assert not mps_enabled()


def test_a_client_of_mps_has_its_share_and_a_lower_priority() -> None:
    assert client_environment(20) == {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "20",
        "CUDA_MPS_CLIENT_PRIORITY": "1",
    }
    assert [name for name, mode in MODES.items() if mode.shares] == ["share"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, "1"), ({"CUDA_VISIBLE_DEVICES": "5, GPU-8932f937"}, "GPU-8932f937")],
)
def test_trainer_sees_only_its_own_gpu(environment: dict[str, str], expected: str) -> None:
    assert visible(1, environment) == expected


@pytest.mark.parametrize(
    ("mode", "threads"), [("idle", [1, 2, 2]), ("device", [1, 1, 24]), ("share", [1, 1, 24])]
)
def test_concurrent_trainer_leaves_engine_threads_unchanged(mode: str, threads: list[int]) -> None:
    processors_and_engine = ((1, 1), (32, 32), (32, 8))
    assert [MODES[mode].threads(*each) for each in processors_and_engine] == threads
    assert (MODES[mode].parks_for == REASONS) == (mode == "idle")
