"""Parts of successive steps may meet any fate: what is committed is always exactly one step's
tensors, and a clean step is committed.

The transaction is the real one; the model is four tensors, and every tensor of a step holds that
step's number. A group gives what was sent through it in that order, also if some of it was refused
meanwhile, until it is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tlt_client.channels import Intake
from tlt_client.channels.errors import ChannelLost
from tlt_server.errors import TltError, Unavailable
from tlt_server.weights.parts import Live, Target
from tlt_server.weights.staging import Staging
from tlt_server.weights.storage import Free, Options, Storage
from tlt_server.weights.transaction import Transaction
from tlt_server.weights.update import REMEMBERED, FailedPush, Staged, Unchanged, Waiting
from tlt_server.wire.commands import Manifest, TensorEntry

NAMES = ("a", "b", "c", "d")
Fate = str
FATES = (
    *("fine", "fine", "fine", "not finite", "broken", "asleep", "not read", "never sent"),
    *("late", "aborted", "repeated", "meanwhile", "another meanwhile"),
)


class Network:
    config = SimpleNamespace(tied_embeddings=False, quantization=None)

    def __init__(self) -> None:
        self.tensors = {name: torch.zeros(4) for name in NAMES}

    def parameters(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def blank(self) -> Network:
        return Network()


class Wire:
    """Stands for a process group: gives the values that were sent, in their order."""

    device, lenient = torch.device("cpu"), False

    def __init__(self) -> None:
        self.sent: list[float] = []
        self.breaks, self.broken = False, ""

    def begin(self, data: torch.Tensor) -> None:
        if self.broken:
            raise ChannelLost(self.broken)
        data.view(torch.float32)[:] = self.sent.pop(0)

    def end(self, work: None, gives_up: Callable[[], bool]) -> None:
        if self.breaks:
            self.broken = "cut"
            raise ChannelLost(self.broken)

    def close(self, why: str = "was left") -> None:
        self.broken = why


class Groups(dict[str, Wire]):
    timeout_s = 10.0

    def leave(self, name: str) -> None:
        self.pop(name, None)

    def __missing__(self, name: str) -> Wire:
        raise ChannelLost(f"there is no group {name!r}")


class Receiving:
    """The transaction and the loop around it, with a clock."""

    def __init__(self, place: Any) -> None:
        self.now, self.groups = 0.0, Groups(g=Wire(), h=Wire())
        storage = Storage(place, lambda: Free(2**62, 0, 0), torch.device("cpu"), None)
        groups: Any = self.groups
        live = Live(Target("v0", Network(), {}))  # type: ignore[arg-type]
        options = Options(("broadcast",), Intake(groups=groups), storage=storage)
        self.transaction = Transaction(live, options, clock=lambda: self.now)

    def join(self, group: str = "g") -> None:
        """Join as a trainer does that begins a step and finds its group left."""
        self.transaction.leave(group)
        self.settle(committing=True)
        self.groups[group] = Wire()

    def step(
        self, number: float, parts: list[tuple[str, ...]], fates: Sequence[Fate], **fields: Any
    ) -> list[str]:
        if "g" not in self.groups or self.groups["g"].broken:
            self.join()
        pairs = zip(parts, fates, strict=False)
        return [self.part(names, number, fate, **fields) for names, fate in pairs]

    def part(self, names: tuple[str, ...], value: float, fate: Fate = "fine", **fields: Any) -> str:
        """Send a part; return the state of the push after it."""
        if fate == "never sent":
            return fate
        tensors = [TensorEntry(name=name, dtype="float32", shape=[4]) for name in names]
        fields = {"channel": "broadcast", "partial": True, "group": "g"} | fields
        manifest = Manifest(packed=False, **fields, tensors=tensors)
        wire = self.groups.get(manifest.group, Wire())
        other = replace(manifest, version="another", partial=False)
        wire.sent += [float("nan") if fate == "not finite" else value] * len(names)
        wire.breaks, asked = fate == "broken", manifest
        try:
            if fate == "asleep":
                raise Unavailable("as the loop refuses it")
            if fate == "not read":  # the frontend refuses it
                self.transaction.skip(manifest.group)
                return self.settle(committing=True)
            push = self.transaction.begin(manifest)
            if isinstance(push.state, Waiting):
                self.transaction.start()
            if "meanwhile" in fate:
                wire.sent += [value + 0.5] * len(names)
                asked = other if fate == "another meanwhile" else manifest
                self.transaction.begin(asked)
        except TltError:
            self.transaction.refuse(asked)
        self.now += 20 if fate == "late" else 0
        said = self.settle(committing=manifest.commit)
        if said == "committed":
            assert self.live["a"].tolist() == [value] * 4, "another step's under this one's name"
        if fate == "aborted" and self.transaction.push is not None:
            self.transaction.abort(self.transaction.push.version)
            return self.settle(committing=True)
        return self.part(names, value, **fields) if fate == "repeated" else said

    def settle(self, committing: bool) -> str:
        push = self.transaction.push
        if push is not None and isinstance(push.state, Staging):
            push.state.wait()
        for _ in range(2):  # a gathering push is told once, and then looked at again
            push = self.transaction.poll()
            if push is None:
                break
            if isinstance(push.state, FailedPush | Unchanged):
                self.transaction.close()
                break
            if isinstance(push.state, Staged) and committing:
                self.transaction.commit(push, push.state)
                self.check()
                return "committed"
        return push.state.name if push is not None else "gathering"

    def check(self) -> None:
        values = {value for tensor in self.live.values() for value in tensor.tolist()}
        assert len(values) == 1, f"a mixture: {self.live}"

    @property
    def live(self) -> dict[str, torch.Tensor]:
        return self.transaction.versions.live.target.network.parameters()


def cuts(parts: int) -> list[tuple[str, ...]]:
    return {
        1: [NAMES],
        2: [NAMES[:1], NAMES[1:]],
        3: [NAMES[:2], NAMES[2:3], NAMES[3:]],
        4: [(name,) for name in NAMES],
    }[parts]


steps = st.lists(
    st.tuples(
        st.integers(1, 4),
        st.lists(st.sampled_from(FATES), min_size=4, max_size=4),
        st.sampled_from(["", "", "", "named", "whole step"]),
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("place", ["device", "none"])
@settings(max_examples=150, deadline=None)
@given(steps=steps)
def test_committed_weights_are_of_one_training_step(
    place: str, steps: list[tuple[int, list[Fate], str]]
) -> None:
    """Trainers go on after an error, or give the step up; parts grow and shrink from step to step;
    some steps have names.
    """
    receiving = Receiving(place)
    for number, (parts, fates, version) in enumerate(steps, 1):
        # What never comes at all is a step that was given up at its start.
        if fates[0] == "never sent":
            continue
        named = f"{version} {number}" if version == "whole step" else version
        receiving.step(float(number), cuts(parts), fates, version=named)
        receiving.now += 1
    said = receiving.step(99.0, cuts(4), ["fine"] * 4)
    assert said == ["gathering"] * 3 + ["committed"] and receiving.live["d"].tolist() == [99.0] * 4


PARTS = st.tuples(st.integers(0, 3), st.sampled_from(FATES))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(PARTS, max_size=6), min_size=1, max_size=4))
def test_session_takes_only_its_own_parts_in_any_order(
    sessions: list[list[tuple[int, Fate]]],
) -> None:
    receiving = Receiving("device")
    for number, sent in enumerate(sessions, 1):
        for place, fate in sent:
            fields = {"session": str(number), "commit": False}
            receiving.step(float(number), [cuts(4)[place]], [fate], **fields)
        push = receiving.transaction.push
        if push is not None and isinstance(push.state, Staged):
            assert push.manifest.session == str(number)
            receiving.transaction.commit(push, push.state)
            receiving.check()
            assert receiving.live["a"].tolist() == [float(number)] * 4
    said = receiving.step(99.0, list(reversed(cuts(4))), ["fine"] * 4, session="last", commit=False)
    assert said[:3] == ["gathering"] * 3


def test_parts_without_a_version_come_through_one_group() -> None:
    receiving = Receiving("device")
    assert receiving.part(("a",), 1.0) == "gathering"
    receiving.part(("b",), 1.0, group="h")
    assert receiving.transaction.push is not None
    assert receiving.transaction.push.manifest.group == "g"
    receiving.part(("b", "c"), 1.0)
    assert receiving.part(("d",), 1.0) == "committed"
    assert "h" not in receiving.groups, "what it brought of a refused part is no other push's"
    receiving.join("h")
    for group, names in (("g", "ab"), ("h", "cd")):
        said = receiving.part(tuple(names), 2.0, group=group, version="two")
    assert said == "committed" and receiving.live["d"].tolist() == [2.0] * 4


def test_rejoined_sender_may_begin_a_push_in_its_own_order() -> None:
    receiving = Receiving("device")
    receiving.part(("a", "b"), 1.0)
    receiving.join()
    assert receiving.part(("c",), 2.0) == "gathering"
    assert receiving.part(("d", "a", "b"), 2.0) == "committed"
    assert receiving.live["a"].tolist() == [2.0] * 4
    receiving.part(("a", "b"), 3.0, version="three")
    receiving.join()
    said = receiving.part(("c", "d"), 3.0, version="three")
    assert said == "committed", "a version's parts may come through several groups"


def test_part_after_a_refused_first_part_fails() -> None:
    receiving = Receiving("device")
    assert receiving.part(("c", "d"), 1.0, "asleep") == "gathering" and "g" not in receiving.groups
    said = receiving.part(("a", "b"), 1.0)
    assert said == "failed", "nothing comes through it until it is joined again"
    halves, both = [("a", "b"), ("c", "d")], ["gathering", "committed"]
    for number in (2.0, 3.0):
        assert receiving.step(number, halves, ["fine", "fine"]) == both
    receiving.join()
    receiving.part(("a", "b"), 4.0, "not read")
    assert receiving.part(("c", "d"), 4.0) == "failed"
    assert receiving.step(5.0, halves, ["fine", "fine"]) == both


def test_abandoned_pushes_take_bounded_memory() -> None:
    receiving = Receiving("device")
    part = Manifest(channel="broadcast", partial=True, tensors=[TensorEntry(name="a")])
    for number in range(REMEMBERED + 10):
        receiving.transaction.refuse(replace(part, version=str(number)))
    assert len(receiving.transaction._series._starts) == REMEMBERED
