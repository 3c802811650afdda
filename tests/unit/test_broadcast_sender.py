"""The trainer's half of a broadcast ends in time whatever the server does: here the group and the server are stand-ins."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tlt_client.channels import broadcast
from tlt_client.channels.broadcast import BroadcastSender
from tlt_client.channels.errors import ChannelBroken
from tlt_client.channels.groups import Group, Membership
from tlt_client.errors import ServerError

TIMEOUT_S = 0.2
TENSORS = {"a": torch.arange(3.0), "b": torch.arange(5.0)}


class Work:
    """Of a communicator whose other rank has not begun to receive, until it has."""

    def __init__(self, done: threading.Event) -> None:
        self._done = done

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: Any) -> None:
        assert self._done.is_set(), "a wait of the library, which has no end"


class Communicator:
    def __init__(self) -> None:
        self.received, self.aborted = threading.Event(), False

    def broadcast(self, tensors: Any, options: Any) -> Work:
        return Work(self.received)

    def abort(self) -> None:
        self.aborted = True


class Server:
    """Answers `push_weights` with what is laid into it, or never."""

    def __init__(self) -> None:
        self.answers, self.reply, self.joins = threading.Event(), {"state": "committed"}, 0
        self.error: Exception | None = None

    def join_group(self, name: str, **fields: Any) -> dict[str, Any]:
        self.joins += 1
        return {}

    def push_weights(self, version: str, **fields: Any) -> dict[str, Any]:
        self.answers.wait()
        if self.error is not None:
            raise self.error
        return self.reply


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.answers.set()


@pytest.fixture
def communicators(monkeypatch: pytest.MonkeyPatch) -> list[Communicator]:
    made: list[Communicator] = []

    def make(group: Group) -> Communicator:
        made.append(Communicator())
        return made[-1]

    monkeypatch.setattr(Group, "_made", make)
    monkeypatch.setattr(broadcast, "GRACE_S", 0.1)
    return made


def test_a_server_that_neither_receives_nor_answers_is_given_up_in_time(server: Server, communicators: list[Communicator]) -> None:
    sender, started = BroadcastSender(server, timeout_s=TIMEOUT_S), time.monotonic()  # type: ignore[arg-type]
    with pytest.raises(ChannelBroken, match=r"takes no part.*make the group anew and push again"):
        sender.push(TENSORS.items(), "v")
    assert 2 * TIMEOUT_S <= time.monotonic() - started < 20 and communicators[0].aborted
    server.answers.set()
    server.join_group("again")
    with pytest.raises(ChannelBroken):
        sender.push(TENSORS.items(), "v")
    assert server.joins == 3 and len(communicators) == 2, "the group was made anew"


def test_what_the_server_says_of_a_push_that_it_ended_is_told(server: Server, communicators: list[Communicator]) -> None:
    server.error = ServerError("weights_refused", "a tensor holds NaN", status=422)
    sender = BroadcastSender(server, timeout_s=30)  # type: ignore[arg-type]
    server.answers.set()
    with pytest.raises(ServerError, match="holds NaN"):
        sender.push(TENSORS.items(), "v")
    assert communicators[0].aborted


@pytest.mark.parametrize("code, anew", [
    ("channel_broken", True), ("conflict", True), ("too_large", True), ("weights_refused", False)])
def test_a_group_that_may_be_out_of_step_is_made_anew(
        code: str, anew: bool, server: Server, communicators: list[Communicator], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where every byte was sent before the server said so."""
    sender = BroadcastSender(server, timeout_s=30)  # type: ignore[arg-type]
    monkeypatch.setattr(sender, "_send", lambda named, reply: None)
    server.error = ServerError(code, "so it is", status=424)
    server.answers.set()
    with pytest.raises(ServerError, match="so it is"):
        sender.push(TENSORS.items(), "v")
    server.error = None
    assert sender.push(TENSORS.items(), "v")["state"] == "committed" and len(communicators) == 1 + anew


def test_a_receiver_whose_trainer_is_silent_relies_on_no_wait_of_the_library(communicators: list[Communicator]) -> None:
    group = Group(Membership("g", "gloo", "127.0.0.1", 1, 0, 2, timeout_s=TIMEOUT_S), store=object())
    work = group.begin(torch.zeros(3))
    assert group.under_way == 1
    with pytest.raises(ChannelBroken, match="takes no part"):
        group.end(work)
    assert group.under_way == 1, "until it is aborted it is on the device"
    group.close()
    assert group.under_way == 0 and communicators[0].aborted
