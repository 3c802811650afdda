"""Whatever befalls the parts of successive steps: what is committed is always exactly one step's tensors, and a clean step is committed.

The transaction is the real one; the model is three tensors, and every tensor of a step holds that step's number.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_client.channels import Intake
from tlt_client.channels.errors import ChannelBroken
from tlt_server.errors import TltError, Unavailable
from tlt_server.records import Manifest, TensorEntry
from tlt_server.weights.parts import Parts, Target
from tlt_server.weights.series import REMEMBERED
from tlt_server.weights.storage import Free, Storage
from tlt_server.weights.transaction import Options, Transaction

NAMES = ("a", "b", "c", "d")
Fate = str
FATES = ("fine", "fine", "fine", "not finite", "broken", "asleep", "never sent", "late", "aborted", "repeated", "meanwhile")


class Network:
    config = SimpleNamespace(tied_embeddings=False)

    def __init__(self) -> None:
        self.tensors = {name: torch.zeros(4) for name in NAMES}

    def parameters(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def blank(self) -> Network:
        return Network()


class Wire:
    """Stands for a process group: gives the value that is being sent."""

    device, lenient = torch.device("cpu"), False

    def __init__(self) -> None:
        self.value, self.breaks = 0.0, False

    def begin(self, data: torch.Tensor) -> None:
        data.view(torch.float32)[:] = self.value

    def end(self, work: None) -> None:
        if self.breaks:
            raise ChannelBroken("cut")

    def close(self) -> None:
        pass


class Groups(dict[str, Wire]):
    timeout_s = 10.0


class Receiving:
    """The transaction and the loop around it, with a clock."""

    def __init__(self, place: Any) -> None:
        self.now, self.wire = 0.0, Wire()
        storage = Storage(place, lambda: Free(2**62, 0, 0), torch.device("cpu"), None)
        groups: Any = Groups(g=self.wire, h=self.wire)
        live = Parts(Target("v0", Network(), {}))  # type: ignore[arg-type]
        self.transaction = Transaction(live, Options(("broadcast",), Intake(groups=groups), storage=storage), lambda data, where: None,
                                       clock=lambda: self.now)

    def part(self, names: tuple[str, ...], value: float, fate: Fate = "fine", **fields: Any) -> str:
        """How the push stands after this part."""
        if fate == "never sent":
            return fate
        manifest = Manifest(channel="broadcast", packed=False, partial=True, **{"group": "g"} | fields,
                            tensors=[TensorEntry(name=name, dtype="float32", shape=[4]) for name in names])
        self.wire.value, self.wire.breaks = (float("nan") if fate == "not finite" else value), fate == "broken"
        try:
            if fate == "asleep":
                raise Unavailable("as the loop refuses it")
            push = self.transaction.begin(manifest)
            if push.state == "waiting":
                self.transaction.start()
            if fate == "meanwhile":
                self.transaction.begin(manifest)
        except TltError:
            self.transaction.refuse(manifest)
        self.now += 20 if fate == "late" else 0
        said = self.settle(committing=manifest.commit)
        if fate == "aborted" and self.transaction.push is not None:
            self.transaction.abort(self.transaction.push.version)
            return self.settle(committing=True)
        return self.part(names, value, **fields) if fate == "repeated" else said

    def settle(self, committing: bool) -> str:
        push = self.transaction.push
        if push is not None and push.thread is not None:
            push.thread.join()
        for _ in range(2):  # a gathering push is told once, and then looked at again
            push = self.transaction.poll()
            if push is None:
                break
            if push.state in ("failed", "unchanged"):
                self.transaction.close()
            elif push.state == "staged" and committing:
                self.transaction.commit()
                self.check()
                return "committed"
        return push.state if push is not None else "gathering"

    def check(self) -> None:
        assert len({value for tensor in self.live.values() for value in tensor.tolist()}) == 1, f"a mixture: {self.live}"

    @property
    def live(self) -> dict[str, torch.Tensor]:
        assert self.transaction.live.target is not None
        return self.transaction.live.target.network.parameters()


def cuts(parts: int) -> list[tuple[str, ...]]:
    return {1: [NAMES], 2: [NAMES[:1], NAMES[1:]], 3: [NAMES[:2], NAMES[2:3], NAMES[3:]], 4: [(name,) for name in NAMES]}[parts]


steps = st.lists(st.tuples(st.integers(1, 4), st.lists(st.sampled_from(FATES), min_size=4, max_size=4),
                           st.sampled_from(["", "", "", "named", "whole step"])), min_size=1, max_size=5)


@pytest.mark.parametrize("place", ["device", "none"])
@settings(max_examples=150, deadline=None)
@given(steps=steps)
def test_what_is_committed_is_one_step(place: str, steps: list[tuple[int, list[Fate], str]]) -> None:
    """Trainers go on after an error, or give the step up; parts grow and shrink from step to step; some steps have names."""
    receiving = Receiving(place)
    for number, (parts, fates, version) in enumerate(steps, 1):
        lost = "never sent" if fates[0] == "never sent" else None  # what never comes at all is a step that was given up at its start
        for names, fate in zip(cuts(parts), fates, strict=False):
            receiving.part(names, float(number), lost or fate, version=f"{version} {number}" if version == "whole step" else version)
        receiving.now += 1
    said = [receiving.part(names, 99.0) for names in cuts(4)]
    assert said == ["gathering"] * 3 + ["committed"] and receiving.live["d"].tolist() == [99.0] * 4


@settings(max_examples=100, deadline=None)
@given(sessions=st.lists(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(FATES)), max_size=6), min_size=1, max_size=4))
def test_a_session_takes_its_parts_in_any_order_and_no_other_ones(sessions: list[list[tuple[int, Fate]]]) -> None:
    receiving = Receiving("device")
    for number, sent in enumerate(sessions, 1):
        for place, fate in sent:
            receiving.part(cuts(4)[place], float(number), fate, session=str(number), commit=False)
        push = receiving.transaction.push
        if push is not None and push.state == "staged":
            assert push.manifest.session == str(number)
            receiving.transaction.commit()
            receiving.check()
            assert receiving.live["a"].tolist() == [float(number)] * 4
    said = [receiving.part((name,), 99.0, session="last", commit=False) for name in reversed(NAMES)]
    assert said[:3] == ["gathering"] * 3


def test_without_a_version_all_comes_through_one_group() -> None:
    receiving = Receiving("device")
    assert receiving.part(("a",), 1.0) == "gathering"
    receiving.part(("b",), 1.0, group="h")
    assert receiving.transaction.push is not None and receiving.transaction.push.manifest.group == "g"
    receiving.part(("b", "c"), 1.0)
    assert receiving.part(("d",), 1.0) == "committed"
    for group, names in (("g", "ab"), ("h", "cd")):
        said = receiving.part(tuple(names), 2.0, group=group, version="two")
    assert said == "committed" and receiving.live["d"].tolist() == [2.0] * 4


def test_who_joins_a_group_anew_begins_a_push_in_an_order_of_their_own() -> None:
    receiving = Receiving("device")
    receiving.part(("a", "b"), 1.0)
    receiving.transaction.forget("g")
    receiving.settle(committing=True)
    assert receiving.part(("c",), 2.0) == "gathering"
    assert receiving.part(("d", "a", "b"), 2.0) == "committed" and receiving.live["a"].tolist() == [2.0] * 4
    receiving.part(("a", "b"), 3.0, version="three")
    receiving.transaction.forget("g")
    receiving.settle(committing=True)
    assert receiving.part(("c", "d"), 3.0, version="three") == "committed", "a version's parts may come through several groups"


def test_senders_that_never_end_a_push_take_no_memory() -> None:
    receiving = Receiving("device")
    for number in range(REMEMBERED + 10):
        receiving.transaction.refuse(Manifest(channel="broadcast", partial=True, version=str(number), tensors=[TensorEntry(name="a")]))
    assert len(receiving.transaction._series._starts) == REMEMBERED
