"""The memory of training: its formula against tensors that a real step keeps; packs in it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest
import torch
from msgspec.structs import replace as replaced

from tests.unit.test_gpu_memory import CONFIG, Drafter, settings
from tlt_server.engine.devices import sizing
from tlt_server.engine.devices.sizing import training_share
from tlt_server.engine.settings import DecidedSettings
from tlt_server.errors import StartupError
from tlt_server.models.draft_networks import ARCHITECTURES, EAGLE1, EAGLE3
from tlt_server.models.training_memory import CPU_SLOTS, GPU_SLOTS, LEAST_SLOTS, TrainingShape
from tlt_server.process.machine import HostMemory
from tlt_server.trainer.learning.attend import trunk_of
from tlt_server.trainer.learning.network import trainable_class
from tlt_server.trainer.learning.objectives import make_objective
from tlt_server.trainer.learning.pack import Pack
from tlt_server.trainer.learning.unroll import forward
from tlt_server.trainer.process.work import DrafterWork
from tlt_server.wire.training import TrainerSettings

GIB = 2**30
SMALL = replace(  # the proportions of a 7B target
    CONFIG,
    vocab_size=640,
    hidden_size=224,
    intermediate_size=1184,
    heads=14,
    kv_heads=2,
    head_dim=16,
)
DRAFTED = 320


def at_7b(architecture: str) -> TrainingShape:
    return TrainingShape.of(replace(CONFIG, architecture=architecture), 32_000, on_gpu=True)


@pytest.mark.parametrize("architecture", [EAGLE3, EAGLE1])
def test_memory_plan_counts_values_and_steps_of_the_trainer(architecture: str) -> None:
    shape = at_7b(architecture)
    config = replace(CONFIG, architecture=architecture, layers=1)
    network = trainable_class(architecture)(config, 32_000, device="meta")
    values = sum(weight.numel() for weight in network.weights.values())
    assert shape.trained == pytest.approx(values, rel=1e-4)  # but for the norms
    assert shape.steps == make_objective(ARCHITECTURES[architecture].objective).steps


def test_a_7b_models_drafter_is_trained_in_16_gib() -> None:
    assert at_7b(EAGLE1).device_bytes(GPU_SLOTS) < at_7b(EAGLE3).device_bytes(GPU_SLOTS)
    assert 14 < at_7b(EAGLE3).device_bytes(GPU_SLOTS) / GIB < 16


def test_budget_holds_the_largest_fitting_pack() -> None:
    shape = at_7b(EAGLE3)
    assert shape.slots_in(shape.most_bytes) == GPU_SLOTS
    assert shape.slots_in(shape.most_bytes - 1) == GPU_SLOTS // 2
    assert shape.slots_in(shape.device_bytes(LEAST_SLOTS)) == LEAST_SLOTS
    assert shape.slots_in(shape.device_bytes(LEAST_SLOTS) - 1) == 0


@cache
def kept_bytes(architecture: str, slots: int, compute: torch.dtype) -> int:
    """Return the bytes that two unrolled steps keep for their gradients."""
    config = replace(SMALL, architecture=architecture, layers=1)
    network = trainable_class(architecture)(config, DRAFTED, compute=compute)
    for weight in network.weights.values():
        weight.normal_(0, 0.1).requires_grad_()
    hidden, features = config.hidden_size, 1 if architecture == EAGLE1 else 3
    frozen = network.frozen(torch.randn(config.vocab_size, hidden), torch.randn(DRAFTED, hidden))
    position_N = torch.arange(slots)
    pack = Pack(
        token_N=position_N % DRAFTED,
        position_N=position_N,
        feature_NF=torch.randn(slots, features * hidden).to(compute),
        teacher_NH=torch.empty(0),
        root_N=torch.ones(slots),
        counted_N=torch.ones(slots, dtype=torch.bool),
        left_N=position_N.flip(0),
        bounds=(0, slots),
        roots=((0, slots),),
        tokens=slots,
    )
    trunk = trunk_of(pack.bounds, network.device, compute)
    steps = [forward(network, frozen, pack, trunk, [])]
    kept: dict[int, int] = {}

    def keep(saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        steps.append(forward(network, frozen, pack, trunk, steps))  # alive, so no storage twice
    return sum(kept.values())


@pytest.mark.parametrize("architecture", [EAGLE3, EAGLE1])
@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32])
def test_training_memory_formula_equals_the_bytes_of_a_slot(
    architecture: str, compute: torch.dtype
) -> None:
    few, many = (kept_bytes(architecture, slots, compute) for slots in (64, 128))
    config = replace(SMALL, architecture=architecture)
    shape = TrainingShape.of(config, DRAFTED, on_gpu=compute == torch.bfloat16)
    assert 0.65 * shape.slot_bytes < (many - few) / 64 <= shape.slot_bytes


DRAFTER = Drafter()


def decided(device: str, **changes: Any) -> DecidedSettings:
    given = {**vars(settings(device=device, policy="goodput", attention="", threads=1)), **changes}
    return DecidedSettings(**given)


def test_trainer_share_covers_gpu_and_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "host_memory", lambda: HostMemory(0, 64 * GIB))
    shape, given = at_7b(EAGLE3), {"feature_bytes": 4 * GIB, "ring_bytes": GIB}
    share = training_share(decided("cuda", **given), DRAFTER)
    assert share == (shape.device_bytes(GPU_SLOTS), shape.host_bytes + 9 * GIB)
    asked = decided("cuda", **given, drafter_training_mb=12 * 1024)
    assert training_share(asked, DRAFTER).device == 12 * GIB
    apart = decided("cuda", **given, drafter_training_device="cuda:1")
    assert training_share(apart, DRAFTER, 80 * GIB) == share
    assert "15851 MiB of cuda:1 and up to 30916" in share.describe("cuda:1")
    with pytest.raises(StartupError, match="of cuda:1, which has 12288; set .*_mb to 11776 at"):
        training_share(apart, DRAFTER, 12 * GIB)
    on_cpu = TrainingShape.of(DRAFTER.config, DRAFTER.draft_vocab_size, on_gpu=False)
    whole = on_cpu.device_bytes(CPU_SLOTS) + on_cpu.host_bytes + 5 * GIB
    assert training_share(decided("cpu", **given), DRAFTER) == (0, whole)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_missing_trainer_share_is_refused_with_a_remedy(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "host_memory", lambda: HostMemory(0, 20 * GIB))
    with pytest.raises(StartupError, match="takes .* it has 20480; lower drafter_feature_mb"):
        training_share(decided(device), DRAFTER)
    with pytest.raises(StartupError, match="drafter_training_mb 9 is too little.* to ([0-9]+), or"):
        training_share(decided(device, drafter_training_mb=9), DRAFTER)


def test_trainer_packs_are_as_long_as_memory_permits() -> None:
    config = replace(SMALL, architecture=EAGLE3)
    network = trainable_class(EAGLE3)(config, DRAFTED)
    shape = TrainingShape.of(config, DRAFTED, on_gpu=False)
    nothing = cast(Any, None)
    given = TrainerSettings("ring", "model", "", 1, 1, 0, work="nowhere")
    for memory, slots in ((0, CPU_SLOTS), (shape.device_bytes(256), 256)):
        work = DrafterWork(replaced(given, memory=memory), "cpu", nothing, nothing)
        work._bound(network)
        assert work.facts.micro_batch == slots
    with pytest.raises(StartupError, match="raise drafter_training_mb"):
        DrafterWork(replaced(given, memory=1), "cpu", nothing, nothing)._bound(network)
