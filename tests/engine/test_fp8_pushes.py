"""Pushes into a server whose linear maps are in FP8: any form that a trainer sends gives the same
version, whose checksums the trainer can compute, and anything else is refused whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.engine.channel_server import LONG_S, Server, in_group
from tests.engine.fp8 import BLOCKS, effective_sums, in_halves
from tests.engine.pushing import why
from tlt_client import ServerError
from tlt_client.channels import CHANNELS, Sender
from tlt_client.channels.broadcast import BroadcastSender
from tlt_client.channels.checksums import mix64
from tlt_client.channels.disk import DiskSender
from tlt_client.channels.http import HttpSender
from tlt_client.channels.ipc import IpcSender
from tlt_client.quantise import SCALE_SUFFIX
from tlt_server.weights import halves
from tlt_server.wire.events import WeightReport

Tensors = dict[str, Tensor]
E4M3 = torch.float8_e4m3fn
MAP = "model.layers.0.self_attn.q_proj.weight"
SCALES = MAP + SCALE_SUFFIX
CHANNELS_OF = [*CHANNELS]


class Fp8Trainer:
    """A server in FP8, and one sender of each channel."""

    def __init__(self, root: Path) -> None:
        self.server: Server = Server(root, shape=BLOCKS, quantization="fp8")
        self.engine, self.new = self.server.engine, self.server.new
        self.senders: dict[str, Sender] = {
            "disk": DiskSender(self.server, root / "weights", max_file_bytes=2**16),  # type: ignore[arg-type]
            "http": HttpSender(self.server, max_file_bytes=2**16),  # type: ignore[arg-type]
            "broadcast": in_group(self.server, BroadcastSender, LONG_S, bucket_bytes=2**16),
            "ipc": IpcSender(self.server, bucket_bytes=2**16),  # type: ignore[arg-type]
        }

    def push(self, channel: str, tensors: Mapping[str, Tensor], version: str = "") -> str:
        reply = self.senders[channel].push(tensors, version or next(self.server.versions))
        return str(reply["state"])

    def refused(self, channel: str, tensors: Mapping[str, Tensor]) -> str:
        """Return the message of a push that changes nothing and leaves nothing."""
        with pytest.raises(ServerError) as caught:
            self.push(channel, tensors)
        assert (caught.value.code, caught.value.retryable) == ("weights_refused", False)
        self.check_unchanged()
        return caught.value.message

    def missing(self) -> list[str]:
        push = self.engine.engine.pushes.transaction.push
        return push.candidate.missing if push is not None else []

    def check_unchanged(self) -> None:
        assert self.server.check() == "old"
        self.server.check_settled()

    def roll_back(self) -> None:
        assert self.engine.roll_back().result == "rolled_back"
        self.check_unchanged()


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fp8Trainer]:
    trainer = Fp8Trainer(tmp_path_factory.mktemp("pushes"))
    yield trainer
    for sender in trainer.senders.values():
        sender.close()
    trainer.server.runner.close()


FORMS: dict[str, Callable[[Tensors], Tensors]] = {
    "as they were trained": lambda tensors: tensors,
    "values next to scales": in_halves,
    "all scales last": lambda tensors: in_halves(tensors, apart=True),
    "backwards": lambda tensors: dict(reversed(in_halves(tensors).items())),
}


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_version_a_trainer_computes(
    form: str, channel: str, trainer: Fp8Trainer
) -> None:
    new = trainer.new
    assert trainer.push(channel, FORMS[form](new), f"{form} by {channel}") == "committed"
    assert trainer.server.check() == "new"
    wanted = effective_sums(new)
    found = trainer.engine.checksums()
    assert {name: found[name] for name in wanted} == wanted
    trainer.roll_back()


def test_directory_in_fp8_is_pushed_by_the_command(trainer: Fp8Trainer, tmp_path: Path) -> None:
    save_file(in_halves(trainer.new), tmp_path / "model.safetensors")
    sender = HttpSender(trainer.server)  # type: ignore[arg-type]
    assert sender.push_directory(tmp_path, "by command")["state"] == "committed"
    assert trainer.server.check() == "new"
    trainer.roll_back()


# -- what is refused -------------------------------------------------------------------------------


def spoiled(
    name: str, value: float, dtype: torch.dtype | None = None
) -> Callable[[Tensors], Tensors]:
    """Return a function that puts this value into a tensor."""

    def spoil(tensors: Tensors) -> Tensors:
        changed = tensors[name].to(dtype or tensors[name].dtype, copy=True)
        changed.view(-1)[-1:] = torch.tensor([value]).to(changed.dtype)
        return tensors | {name: changed}

    return spoil


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {each: tensor for each, tensor in tensors.items() if each != name}


EMBEDDING = "model.embed_tokens.weight"
BAD: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "NaN among values": (spoiled(MAP, float("nan")), f"{MAP}.*holds 1 NaN or infinite"),
    "a scale of zero": (spoiled(SCALES, 0.0), f"{SCALES}.*1 scales such as 0.0, expected finite"),
    "a negative scale": (spoiled(SCALES, -1.0), f"{SCALES}.*1 scales such as -1.0"),
    "an infinite scale": (spoiled(SCALES, float("inf")), f"{SCALES}.*NaN or infinite"),
    "a scale that is not a number": (spoiled(SCALES, float("nan")), f"{SCALES}.*NaN or infinite"),
    "a scale beyond bfloat16": (spoiled(SCALES, 3e38), f"{MAP}.*beyond the range of bfloat16"),
    "a row of scales more": (
        lambda tensors: tensors | {SCALES: torch.ones(2, 1)},
        rf"{SCALES}.*\[2, 1\].*expected \[1, 1\]",
    ),
    "scales in whole numbers": (
        lambda tensors: tensors | {SCALES: torch.ones(1, 1, dtype=torch.int32)},
        f"{SCALES}.*int32.*expected.*bfloat16 or torch.float32",
    ),
    "no scales": (without(SCALES), f"{MAP}.*without its scales '{SCALES}'"),
    "no values": (without(MAP), f"tensor '{MAP}' is missing"),
    "scales of other values": (
        lambda tensors: tensors | {MAP: tensors[MAP].bfloat16()},
        f"{MAP}.*has scales, and comes in torch.bfloat16",
    ),
    "scales of an embedding": (
        lambda tensors: tensors | {EMBEDDING + SCALE_SUFFIX: torch.ones(1, 1)},
        f"does not keep '{EMBEDDING}' in FP8; push its bfloat16 values",
    ),
    "an embedding in e4m3": (
        lambda tensors: tensors | {EMBEDDING: tensors[EMBEDDING].to(E4M3)},
        f"'{EMBEDDING}' is in e4m3.*does not keep it in FP8",
    ),
}


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("name", BAD)
def test_halves_that_do_not_fit_are_refused_whole(
    name: str, channel: str, trainer: Fp8Trainer
) -> None:
    spoil, said = BAD[name]
    message = trainer.refused(channel, spoil(in_halves(trainer.new)))
    assert re.search(said, message), message


def test_shape_of_scales_is_checked_before_memory_is_taken(trainer: Fp8Trainer) -> None:
    tensors = in_halves(trainer.new) | {SCALES: torch.ones(64, 64)}
    for channel in ("broadcast", "ipc"):
        assert re.search(rf"the manifest: .*{SCALES}.*expected", trainer.refused(channel, tensors))


def test_scales_may_come_in_bfloat16(trainer: Fp8Trainer) -> None:
    narrow = {
        name: tensor.bfloat16() if name.endswith(SCALE_SUFFIX) else tensor
        for name, tensor in in_halves(trainer.new).items()
    }
    assert trainer.push("ipc", narrow) == "committed"
    assert trainer.server.check() == "new"
    trainer.roll_back()


def test_scales_of_any_size_are_kept(trainer: Fp8Trainer) -> None:
    """A checkpoint's scales need not be powers of two."""
    other = in_halves(trainer.new)
    other[SCALES] = other[SCALES] * 1.3
    assert trainer.push("http", other) == "committed"
    found = trainer.engine.checksums()
    product = (other[MAP].float() * other[SCALES]).bfloat16()
    assert found[MAP] == mix64(product) != effective_sums(trainer.new)[MAP]
    trainer.roll_back()


@pytest.mark.parametrize("channel", CHANNELS)
def test_block_of_zeros_and_tiny_values_is_pushed(channel: str, trainer: Fp8Trainer) -> None:
    for value in (0.0, 2.0**-120):
        tensors = trainer.new | {MAP: torch.full_like(trainer.new[MAP], value)}
        assert trainer.push(channel, tensors) == "committed"
        assert trainer.engine.checksums()[MAP] == mix64(torch.zeros_like(tensors[MAP]))
        trainer.roll_back()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.38e38])
def test_values_that_no_scale_holds_are_refused(value: float, trainer: Fp8Trainer) -> None:
    message = trainer.refused("ipc", spoiled(MAP, value, torch.bfloat16)(trainer.new))
    assert re.search(f"{MAP}.*(NaN or infinite|beyond the range)", message), message


def test_held_halves_are_limited(trainer: Fp8Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "HELD_BYTES", 2**15)
    assert "push each matrix next to its scales" in trainer.refused(
        "broadcast", in_halves(trainer.new, apart=True)
    )
    assert trainer.push("broadcast", in_halves(trainer.new)) == "committed"
    trainer.roll_back()


# -- in parts --------------------------------------------------------------------------------------


def send(trainer: Fp8Trainer, tensors: Tensors, version: str) -> WeightReport:
    folder = trainer.server.root / "weights" / f"part-{next(trainer.server.ids)}"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    named = [{"name": name} for name in tensors]
    return trainer.engine.push(folder, version, partial=True, tensors=named)


def test_halves_of_a_matrix_may_come_in_two_parts(trainer: Fp8Trainer) -> None:
    for first_half in (MAP, SCALES):
        tensors = in_halves(trainer.new)
        second_half = ({MAP, SCALES} - {first_half}).pop()
        last = {second_half: tensors.pop(second_half)}
        assert send(trainer, tensors, f"{first_half} first").result == "gathering"
        assert trainer.missing() == [second_half]
        assert send(trainer, last, f"{first_half} first").result == "committed"
        assert trainer.server.check() == "new"
        trainer.roll_back()


def test_half_quantised_version_in_parts_is_never_live(trainer: Fp8Trainer) -> None:
    tensors = in_halves(trainer.new)
    late = {MAP: trainer.new[MAP]}
    assert send(trainer, without(MAP)(tensors), "mixed").result == "gathering"
    refused = send(trainer, late, "mixed")
    assert refused.result == "weights_refused"
    assert "has scales, and comes in torch.float32" in why(refused)
    trainer.check_unchanged()
    first = {name: each for name, each in trainer.new.items() if ".1." not in name}
    last = {name: each for name, each in tensors.items() if ".1." in name}
    assert send(trainer, first, "late scales").result == "gathering"
    refused = send(trainer, {SCALES: tensors[SCALES]}, "late scales")
    assert refused.result == "weights_refused"
    assert "has scales, and comes in another type than e4m3" in why(refused)
    trainer.check_unchanged()
    assert send(trainer, first, "by layer").result == "gathering"
    assert send(trainer, last, "by layer").result == "committed", "each matrix has its own form"
    assert trainer.server.check() == "new"
    trainer.roll_back()


# -- meanwhile -------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["open", "read", "check", "fill", "spool", "done"])
@pytest.mark.parametrize("channel", CHANNELS)
def test_death_in_any_phase_leaves_the_active_version(
    channel: str, phase: str, trainer: Fp8Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = in_halves if (CHANNELS_OF.index(channel) + len(phase)) % 2 else dict

    def die(entered: str) -> None:
        if entered == phase:
            raise SystemExit("killed by the test")

    with monkeypatch.context() as patched:
        patched.setattr(trainer.engine.engine.pushes.transaction, "on_phase", die)
        with pytest.raises(ServerError, match="killed by the test"):
            trainer.push(channel, form(trainer.new))
    trainer.check_unchanged()
    assert trainer.push(channel, form(trainer.new)) == "committed"
    assert trainer.server.check(speaks=False) == "new"
    trainer.roll_back()
