"""Bytes that were sent through a process group and that nothing takes never become the next push's:
over real gloo groups, with the trainer in this process.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.test_steps_never_mix import NAMES, Network
from tlt_client.channels import Intake
from tlt_client.channels.groups import Groups, Membership, WeightGroup, host_store
from tlt_server.engine.gate import StepGate
from tlt_server.engine.pushes.pushes import WeightPushes
from tlt_server.process.faults import Containment
from tlt_server.weights.parts import Live, Target
from tlt_server.weights.storage import Free, Options, Storage
from tlt_server.weights.transaction import Transaction
from tlt_server.wire.commands import (
    JoinGroup,
    LeaveGroup,
    Manifest,
    PushWeights,
    TensorEntry,
    WeightCommand,
)
from tlt_server.wire.events import WeightReport

WAIT_S = 20.0
HALVES = NAMES[:2], NAMES[2:]


class Pair:
    """The weights' side of an engine, stepped by hand, and a trainer that broadcasts without
    waiting, as NCCL does.
    """

    def __init__(self) -> None:
        live = Live(Target("v0", Network(), {}))  # type: ignore[arg-type]
        storage = Storage("device", lambda: Free(2**62, 0, 0), torch.device("cpu"), None)
        options = Options(("broadcast",), Intake(groups=Groups(WAIT_S)), storage=storage)
        self.transaction = Transaction(live, options)
        scheduler: Any = SimpleNamespace(
            started=lambda adapter: 0,
            change_version=lambda version, in_flight: [],
            faults=Containment(),
        )
        self.pushes = WeightPushes(
            StepGate(), self.transaction, scheduler, lambda live, changed: None, list
        )
        self.ids, self.reports = map(str, itertools.count()), dict[str, WeightReport]()
        self.trainer: WeightGroup | None = None
        self.join()

    def ask(self, command: WeightCommand) -> str:
        self.pushes.apply(command)
        return command.id

    def told(self, id: str) -> tuple[str, str]:
        """Result and message."""
        give_up = time.monotonic() + 2 * WAIT_S
        while id not in self.reports:
            assert time.monotonic() < give_up, f"no report {id}"
            self.pushes.advance()
            self.reports |= {report.id: report for report in self.pushes.take_reports()}
            time.sleep(0.001)
        report = self.reports[id]
        return report.result, report.error[1] if report.error else ""

    def join(self) -> None:
        self.close()
        store = host_store("127.0.0.1", 0, 2, WAIT_S)
        id = self.ask(JoinGroup(next(self.ids), "g", "gloo", "127.0.0.1", store.port, 1, 2))
        self.trainer = WeightGroup(
            Membership("g", "gloo", "127.0.0.1", store.port, 0, 2, False, WAIT_S), store
        )
        assert self.told(id)[0] == "joined"

    def close(self) -> None:
        if self.trainer is not None:
            self.trainer.close()

    def send(self, value: float, count: int) -> None:
        assert self.trainer is not None
        for _ in range(count):
            self.trainer.begin(torch.full((4,), value).view(torch.uint8))

    def push(self, names: tuple[str, ...], version: str = "", **fields: Any) -> str:
        tensors = [TensorEntry(name=name, dtype="float32", shape=[4]) for name in names]
        return self.ask(
            PushWeights(
                next(self.ids),
                Manifest(
                    version=version,
                    channel="broadcast",
                    packed=False,
                    group="g",
                    tensors=tensors,
                    **fields,
                ),
            )
        )

    @property
    def live(self) -> list[float]:
        return [
            tensor.tolist()[0]
            for tensor in self.transaction.versions.live.target.network.parameters().values()
        ]


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_push_refused_during_a_broadcast_breaks_the_group(pair: Pair) -> None:
    two, three = pair.push(NAMES, "two"), pair.push(NAMES, "three")
    pair.send(2.0, 4)
    pair.send(3.0, 4)
    assert pair.told(two)[0] == "committed" and pair.live == [2.0] * 4
    result, said = pair.told(three)
    assert result == "conflict" and "'g'" in said and "join it again" in said
    four = pair.push(NAMES, "four")
    pair.send(4.0, 4)
    assert pair.told(four)[0] == "channel_broken" and pair.live == [2.0] * 4
    pair.join()
    five = pair.push(NAMES, "five")
    pair.send(5.0, 4)
    assert pair.told(five)[0] == "committed" and pair.live == [5.0] * 4


def test_part_refused_during_a_broadcast_breaks_the_group(pair: Pair) -> None:
    first, second = (pair.push(names, partial=True) for names in HALVES)
    pair.send(2.0, 4)
    assert pair.told(first)[0] == pair.told(second)[0] == "conflict"
    third = pair.push(HALVES[0], partial=True)
    pair.send(3.0, 2)
    assert pair.told(third)[0] == "channel_broken"
    pair.join()
    for names, result in zip(HALVES, ("gathering", "committed"), strict=True):
        part = pair.push(names, partial=True)
        pair.send(4.0, 2)
        assert pair.told(part)[0] == result
    assert pair.live == [4.0] * 4


def test_part_failing_during_other_broadcasts_breaks_the_group(pair: Pair) -> None:
    first = pair.push(HALVES[0], partial=True)
    pair.send(float("nan"), 2)
    pair.send(2.0, 2)
    result, said = pair.told(first)
    assert result == "weights_refused"
    assert "group 'g' is left" in said, "and the trainer goes on with the next step"
    third = pair.push(HALVES[0], partial=True)
    pair.send(3.0, 2)
    assert pair.told(third)[0] == "channel_broken" and pair.live == [0.0] * 4


@pytest.mark.parametrize("on_the_wire", [False, True])
def test_body_refused_by_the_frontend_makes_its_group_leave(pair: Pair, on_the_wire: bool) -> None:
    if on_the_wire:
        two = pair.push(NAMES, "two")
        assert pair.told(pair.ask(LeaveGroup(next(pair.ids), "g")))[0] == "conflict"
    assert pair.told(pair.ask(LeaveGroup(next(pair.ids), "g", out_of_step=True)))[0] == "left"
    if on_the_wire:
        pair.send(2.0, 4)
        assert pair.told(two)[0] == "committed"
        assert pair.live == [2.0] * 4, "what is on the wire comes to its end"
    assert list(pair.transaction.options.intake.groups) == []


def test_push_refused_after_arrival_leaves_the_group_in_step(pair: Pair) -> None:
    spoiled = pair.push(NAMES, "two")
    pair.send(float("nan"), 4)
    assert pair.told(spoiled)[0] == "weights_refused"
    good = pair.push(NAMES, "two")
    pair.send(2.0, 4)
    assert pair.told(good)[0] == "committed" and pair.live == [2.0] * 4
