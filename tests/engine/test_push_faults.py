"""The table of channel and fault: each push is refused with its error, the previous version stays
live, no memory is held and the next push by the same sender works.

Each row goes through the trainers' own senders into the real transaction, within this process.
`test_channel_faults` spoils single chunks on their way, `test_file_faults` the files of a
directory.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.engine.adapters import ALL, write_adapter
from tests.engine.channel_server import LONG_S, Server, bucket_bytes, in_group
from tests.engine.pushing import small_request, why
from tlt_client import ServerError, channels
from tlt_client.channels import Sender
from tlt_client.channels.broadcast import BroadcastReceiver, BroadcastSender
from tlt_client.channels.disk import DiskSender
from tlt_client.channels.http import HttpSender
from tlt_client.channels.ipc import IpcSender
from tlt_server.engine.gate import Reason
from tlt_server.weights import arriving, spool
from tlt_server.weights.spool import Spool
from tlt_server.weights.storage import Free
from tlt_server.wire.commands import AbortWeights, Manifest, PushWeights, UnloadAdapter

CHANNELS = (*channels.CHANNELS,)
PHASES = ("open", "read", "check", "fill", "spool", "done")
LORA = {"r": 4, "lora_alpha": 8.0, "use_rslora": False, "target_modules": [*ALL]}
HTTP_CALLS = ("put_weights", "weights_part", "abort_weights", "push_weights")
Tensors = dict[str, Tensor]
Entries = list[dict[str, Any]]


class Caller:
    """The server as a sender calls it, with manifests that a test may spoil."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.change: Callable[[Entries], Entries] = lambda entries: entries

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def push_weights(self, version: str, *, tensors: Entries, **fields: Any) -> dict[str, Any]:
        return self._server.push_weights(version, tensors=self.change(tensors), **fields)


class Trainer:
    """One sender of each channel, and the good tensors of each role."""

    def __init__(self, root: Path) -> None:
        self.server = Server(root)
        self.caller: Any = Caller(self.server)
        bucket = bucket_bytes(self.server)
        self.senders: dict[str, Sender] = {
            "disk": DiskSender(self.caller, root / "weights", max_file_bytes=2**14),
            "http": HttpSender(self.caller, max_file_bytes=2**14, sleep=lambda s: None),
            "broadcast": in_group(self.caller, BroadcastSender, LONG_S, bucket_bytes=bucket),
            "ipc": IpcSender(self.caller, bucket_bytes=bucket),
        }
        adapter = write_adapter(root / "adapter", root / "base", 1)
        self.good: dict[str, Tensors] = {
            "target": self.server.new,
            "drafter": self.server.new_drafter,
            "adapter": load_file(adapter / "adapter_model.safetensors"),
        }

    def push(
        self, channel: str, tensors: Tensors, role: str = "target", **fields: Any
    ) -> Mapping[str, Any]:
        if role == "adapter":
            fields |= {"adapter": "math", "adapter_config": {**LORA}}
        return self.senders[channel].push(
            tensors, fields.pop("version", next(self.server.versions)), role=role, **fields
        )

    def refused(self, *given: Any, **fields: Any) -> ServerError:
        """Return the error of a push that changes nothing and leaves nothing."""
        with pytest.raises(ServerError) as caught:
            self.push(*given, **fields)
        self.check_unchanged()
        return caught.value

    def check_unchanged(self, *, speaks: bool = True) -> None:
        assert self.server.check(speaks=speaks) == "old"
        assert self.server.engine.engine.pushes.state().adapters == {}
        self.server.check_settled()

    def works(self, channel: str, role: str = "target") -> None:
        """Push sound weights by the same sender, then roll back."""
        engine = self.server.engine
        assert self.push(channel, self.good[role], role)["state"] == "committed"
        if role == "adapter":
            id = next(self.server.ids)
            engine.engine.send(UnloadAdapter(id, "math", "drain"))
            assert engine.report(id).result == "unloaded"
        else:
            assert role != "target" or self.server.check(speaks=False) == "new"
            assert engine.roll_back().role == role
        self.check_unchanged(speaks=False)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path_factory.mktemp("pushes"))
    yield trainer
    for sender in trainer.senders.values():
        sender.close()
    trainer.server.runner.close()


# -- without a fault -------------------------------------------------------------------------------


def test_every_channel_has_a_sender_in_the_table(trainer: Trainer) -> None:
    assert (*trainer.senders,) == CHANNELS


def test_every_channel_brings_the_same_target_and_drafter(trainer: Trainer) -> None:
    server, engine, caller = trainer.server, trainer.server.engine, trainer.caller
    both = server.new | {f"draft.{name}": each for name, each in server.new_drafter.items()}
    before, found = engine.checksums(), list[dict[str, str]]()
    singly = {"packed": False, "prefixed": True, "name": "one.by.one"}
    senders: list[Sender] = [
        *trainer.senders.values(),
        DiskSender(caller, server.root / "weights", max_file_bytes=2**14),
        HttpSender(caller, max_file_bytes=2**14, chunk_bytes=2**12),
        in_group(caller, BroadcastSender, LONG_S, **singly),
        IpcSender(caller, bucket_bytes=1, checksums=True),
    ]
    for count, sender in enumerate(senders):
        assert sender.push(both, f"both-{count}", role="all")["state"] == "committed"
        state = engine.engine.pushes.state()
        assert state.target == state.drafter == f"both-{count}"
        found.append(engine.checksums())
        assert engine.roll_back().result == "rolled_back" and engine.checksums() == before
    assert found[0].keys() == before.keys() and all(each == found[0] for each in found)
    assert not {name for name in before if before[name] == found[0][name]} - {"draft.d2t"}
    senders[6].close()
    trainer.check_unchanged()


ASKED = small_request(6)


def test_every_channel_brings_the_same_adapter(trainer: Trainer) -> None:
    engine, found = trainer.server.engine, list[Any]()
    plain = engine.run(ASKED)
    for channel in CHANNELS:
        trainer.push(channel, trainer.good["adapter"], "adapter", version=f"by-{channel}")
        assert engine.engine.pushes.state().adapters == {"math": f"by-{channel}"}
        found.append(engine.run(msgspec.structs.replace(ASKED, lora="math")))
        assert engine.spans("r")[0][0].endswith(f"+math@by-{channel}")
        assert engine.run(ASKED) == plain and trainer.server.check() == "old"
    assert found[0] != plain and all(each == found[0] for each in found)
    trainer.works("disk", "adapter")


@pytest.mark.parametrize("channel", CHANNELS)
def test_version_name_is_refused_for_different_content(
    channel: str, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, version = trainer.good["target"], f"again by {channel}"
    replies = [trainer.push(channel, good, version=version)]
    with pytest.raises(ServerError, match="other content") as caught:
        trainer.push(channel, changed(torch.neg)(good), version=version)
    assert caught.value.code == "conflict" and trainer.server.check() == "new"
    replies.append(trainer.push(channel, good, version=version))
    assert [reply["state"] for reply in replies] == ["committed", "unchanged"]
    assert trainer.server.engine.roll_back().result == "rolled_back"
    trainer.works(channel)


def test_repeated_manifest_is_answered_without_its_upload(trainer: Trainer) -> None:
    """Send a body again, as a client does that has lost the first reply."""
    caller, replies = trainer.caller, list[str]()
    again = HttpSender(SimpleNamespace(**{name: getattr(caller, name) for name in HTTP_CALLS}))  # type: ignore[arg-type]

    def twice(version: str, **fields: Any) -> dict[str, Any]:
        replies.extend(caller.push_weights(version, **fields)["state"] for _ in range(2))
        return {}

    again._client.push_weights = twice  # type: ignore[method-assign]
    again.push(trainer.good["target"], "sent twice")
    assert replies == ["committed", "unchanged"]
    assert trainer.server.engine.roll_back().result == "rolled_back"
    trainer.check_unchanged()


# -- what is pushed --------------------------------------------------------------------------------


def floating(tensors: Tensors) -> str:
    return next(name for name in sorted(tensors) if tensors[name].is_floating_point())


def without_last(tensors: Tensors) -> Tensors:
    return {name: tensors[name] for name in sorted(tensors)[:-1]}


def changed(change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {floating(tensors): change(tensors[floating(tensors)])}


def holding(value: float) -> Callable[[Tensors], Tensors]:
    return changed(lambda tensor: torch.cat([tensor[:-1], torch.full_like(tensor[-1:], value)]))


CONTENTS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "a tensor missing": (without_last, "|".join(("missing", "lack", "only 'd2t'", "lora_B"))),
    "a tensor more": (lambda tensors: tensors | {"model.stranger": torch.ones(2)}, "stranger"),
    "a row more": (changed(lambda tensor: torch.cat([tensor, tensor[:1]])), "shape"),
    "whole numbers": (changed(lambda tensor: tensor.int()), "dtype|int32"),
    "not a number": (holding(float("nan")), "NaN or infinite"),
    "infinite": (holding(float("inf")), "NaN or infinite"),
}
OF_TARGET = [(channel, content, "target") for channel in CHANNELS for content in CONTENTS]
OF_OTHERS = [
    (CHANNELS[(place + shift) % len(CHANNELS)], content, role)
    for shift, role in enumerate(("drafter", "adapter"))
    for place, content in enumerate(CONTENTS)
]


@pytest.mark.parametrize(("channel", "content", "role"), [*OF_TARGET, *OF_OTHERS])
def test_pushed_content_that_does_not_fit_is_refused(
    channel: str, content: str, role: str, trainer: Trainer
) -> None:
    spoil, said = CONTENTS[content]
    error = trainer.refused(channel, spoil(trainer.good[role]), role)
    assert (error.code, error.retryable) == ("weights_refused", False)
    assert re.search(said, error.message), error.message
    trainer.works(channel, role)


# -- what is said of it, and when ------------------------------------------------------------------


def first_with(**fields: Any) -> Callable[[Entries], Entries]:
    return lambda entries: [entries[0] | fields, *entries[1:]]


class Case(NamedTuple):
    """A fault around a push of good tensors."""

    code: str
    said: str
    entries: Callable[[Entries], Entries] = lambda entries: entries
    fields: dict[str, Any] = {}
    around: Callable[[Trainer, pytest.MonkeyPatch], object] = lambda trainer, patched: None


def once(sound: Callable[..., Any], error: Exception, at: int = 1) -> Callable[..., Any]:
    """Return the function with a new error at one of its calls; a traceback would hold frames."""
    calls = itertools.count(1)

    def called(*given: Any) -> Any:
        if next(calls) == at:
            raise type(error)(*error.args)
        return sound(*given)

    return called


def fails(owner: Any, name: str, error: Exception, at: int = 1) -> Any:
    return lambda trainer, patched: patched.setattr(
        owner, name, once(getattr(owner, name), error, at)
    )


def closed(trainer: Trainer, patched: pytest.MonkeyPatch) -> None:
    transaction = trainer.server.engine.engine.pushes.transaction
    patched.setattr(transaction, "options", replace(transaction.options, channels=()))


def asleep(trainer: Trainer, patched: pytest.MonkeyPatch) -> None:
    gate = trainer.server.engine.engine.gate
    patched.setattr(gate, "held_for", lambda reason: reason is Reason.WEIGHTS_ASLEEP)


def no_room(trainer: Trainer, patched: pytest.MonkeyPatch) -> None:
    storage = trainer.server.engine.engine.pushes.transaction.options.storage
    patched.setattr(storage, "_free", lambda: Free(0, 0, 0))


def no_thread(trainer: Trainer, patched: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread, sound: Any = threading.Thread.start) -> None:
        if thread.name == "stage weights":
            raise RuntimeError("can't start new thread")
        sound(thread)

    patched.setattr(threading.Thread, "start", start)


def refuses(said: str, entries: Callable[[Entries], Entries]) -> Case:
    return Case("weights_refused", said, entries)


def breaks(said: str, *given: Any) -> Case:
    return Case("push_failed", said, around=fails(*given))


FULL = OSError(28, "No space left on device")
OF_GPU = torch.OutOfMemoryError("CUDA out of memory.\nand more")
OF_HOST = RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory: 8 bytes.")
ROOM, AGAIN = "No space left.*make room", "cannot be recorded.*push again"
OUT = "memory ran out.*bucket_bytes.*--memory-fraction.*--weight-staging host or disk"
CASES = {
    "a checksum of other bytes": refuses("checksum", first_with(checksum="xxh3:" + "0" * 32)),
    "an unknown checksum": refuses("checksum", first_with(checksum="crc32:00000000")),
    "another dtype": refuses("int32", first_with(dtype="int32")),
    "a tensor twice": refuses("twice", lambda all: [*all, all[0] | {"checksum": "xxh3:0"}]),
    "trained for another target": Case(
        "conflict", "'v999'.*train it for that one", fields={"of": "v999"}
    ),
    "a name of other content": Case("conflict", "other content", fields={"version": "taken"}),
    "closed channel": Case("forbidden", "takes no weights by", around=closed),
    "sleeping weights": Case("conflict", "the weights sleep; wake them first", around=asleep),
    "no thread": Case("unavailable", "can't start new thread.*pids limit", around=no_thread),
    "no room for a model": Case("push_failed", r"free are 0 MiB \(device\)", around=no_room),
    "memory of Python ends": breaks(OUT, arriving, "contents", MemoryError(), 2),
    "memory of a GPU ends": breaks(OUT, arriving, "contents", OF_GPU, 2),
    "memory of the host ends": breaks(OUT, arriving, "contents", OF_HOST, 2),
    "a disk full at the start": breaks(ROOM, Spool, "begin", FULL),
    "a disk full halfway": breaks(ROOM, spool, "private_file", FULL),
    "a disk full at the end": breaks(ROOM, Spool, "prepare", FULL),
    "a commit that cannot be recorded": breaks(AGAIN, Spool, "commit", FULL),
}


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("name", CASES)
def test_fault_around_a_push_leaves_the_active_version(
    name: str, channel: str, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    if name == "a name of other content":
        trainer.push(channel, {**trainer.good["target"]}, version="taken")
        assert trainer.server.engine.roll_back().result == "rolled_back"
        monkeypatch.setitem(trainer.good, "spoiled", changed(torch.neg)(trainer.good["target"]))
    with monkeypatch.context() as patched:
        patched.setattr(trainer.caller, "change", case.entries)
        case.around(trainer, patched)
        with pytest.raises(ServerError) as caught:
            tensors = trainer.good.get("spoiled", trainer.good["target"])
            trainer.push(channel, tensors, **case.fields)
    error, retryable = caught.value, case.code in ("push_failed", "unavailable")
    assert re.search(case.said, error.message, re.DOTALL), error.message
    assert "and more" not in error.message
    if channel == "broadcast" and retryable:
        assert (error.code, error.retryable) == ("channel_broken", False)
        assert "send again" in error.message, "its bytes are gone, so to ask again is to wait"
    else:
        assert (error.code, error.retryable) == (case.code, retryable)
    trainer.check_unchanged()
    trainer.works(channel)


@pytest.mark.parametrize("at", [1, 5])
def test_lasting_memory_shortage_breaks_only_the_pushs_group(
    at: int, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound, calls = BroadcastReceiver._buffer, itertools.count(1)

    def buffer(receiver: BroadcastReceiver, size: int) -> Tensor:
        if next(calls) >= at:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return sound(receiver, size)

    with monkeypatch.context() as patched:
        patched.setattr(BroadcastReceiver, "_buffer", buffer)
        error = trainer.refused("broadcast", trainer.good["target"])
    assert (error.code, error.retryable) == ("channel_broken", False)
    for words in ("could not take what was still on its way", "Before that: memory ran out"):
        assert words in error.message
    trainer.works("broadcast")


# -- meanwhile -------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("channel", CHANNELS)
def test_abort_in_any_phase_ends_only_the_named_push(
    channel: str, phase: str, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second push is a conflict that names the open one."""
    engine, version, asked = trainer.server.engine, f"{channel} until {phase}", list[str]()
    other = PushWeights("other", Manifest(version="other", path="nowhere"))
    aborts = [AbortWeights("no push", "other"), AbortWeights("abort", version)]

    def meddle(entered: str) -> None:
        if entered == phase and not asked:
            asked.append(entered)
            for command in (other, *aborts):
                engine.reports.pop(command.id, None)
                engine.engine.send(command)
            while "abort" not in engine.reports:  # the sender's thread steps the loop
                time.sleep(0.001)

    transaction = engine.engine.pushes.transaction
    monkeypatch.setattr(transaction, "on_phase", meddle)
    error = trainer.refused(channel, trainer.good["target"], version=version)
    assert error.code in ("conflict", "channel_broken") and "aborted" in error.message
    refused = engine.reports["other"]
    assert refused.result == "conflict" and f"{version!r} is being pushed" in why(refused)
    assert engine.reports["no push"].result == "not_found"
    assert engine.reports["abort"].result == "aborted"
    trainer.works(channel)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("channel", CHANNELS)
def test_staging_thread_death_leaves_the_active_version(
    channel: str, phase: str, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = (MemoryError, SystemExit, KeyboardInterrupt, RecursionError)
    kind = kinds[(PHASES.index(phase) + CHANNELS.index(channel)) % 4]

    def die(entered: str) -> None:
        if entered == phase:
            raise kind("killed by the test")

    with monkeypatch.context() as patched:
        patched.setattr(trainer.server.engine.engine.pushes.transaction, "on_phase", die)
        error = trainer.refused(channel, trainer.good["target"])
    assert error.code == ("channel_broken" if channel == "broadcast" else "push_failed")
    assert kind.__name__ in error.message or "memory ran out" in error.message
    trainer.works(channel)
