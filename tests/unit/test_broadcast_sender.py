"""The trainer's half of a broadcast ends in time in spite of the server: here the group and the
server are stand-ins.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.waiting import until
from tlt_client.channels import broadcast, groups
from tlt_client.channels.broadcast import BroadcastSender
from tlt_client.channels.errors import ChannelLost
from tlt_client.channels.groups import Membership, WeightGroup, host_store
from tlt_client.errors import ConnectionFailed, NotLive, ServerError

pytestmark = pytest.mark.slow  # waits for timeouts
TIMEOUT_S = 0.5
TENSORS = {"a": torch.arange(3.0), "b": torch.arange(5.0)}


class Work:
    """A communicator's operation, pending until the other rank receives."""

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
    """Answers `push_weights` with the given reply, or never."""

    def __init__(self) -> None:
        self.answers, self.reply, self.joins = threading.Event(), {"state": "committed"}, 0
        self.error: Exception | None = None
        self.info: dict[str, Any] = {}
        self.joined: dict[str, Any] = {}

    def server_info(self) -> dict[str, Any]:
        return self.info

    def join_group(self, name: str, **fields: Any) -> dict[str, Any]:
        self.joins += 1
        self.joined = fields
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

    def make(group: WeightGroup) -> Communicator:
        made.append(Communicator())
        return made[-1]

    monkeypatch.setattr(WeightGroup, "_made", make)
    monkeypatch.setattr(broadcast, "GRACE_S", 0.1)
    return made


def test_broadcast_to_a_silent_server_times_out(
    server: Server, communicators: list[Communicator]
) -> None:
    sender, started = BroadcastSender(server, timeout_s=TIMEOUT_S), time.monotonic()  # type: ignore[arg-type]
    with pytest.raises(ChannelLost, match=r"takes no part.*make the group again, then push"):
        sender.push(TENSORS.items(), "v")
    assert 2 * TIMEOUT_S <= time.monotonic() - started < 60 and communicators[0].aborted
    server.answers.set()
    server.join_group("again")
    with pytest.raises(ChannelLost):
        sender.push(TENSORS.items(), "v")
    assert server.joins == 3 and len(communicators) == 2, "the group was made again"


@pytest.mark.parametrize("replicas", [1, 3])
def test_group_has_the_sender_and_every_replica(
    replicas: int, server: Server, communicators: list[Communicator]
) -> None:
    server.info = {"dp_size": replicas}
    BroadcastSender(server, timeout_s=30)  # type: ignore[arg-type]
    assert (server.joined["rank_offset"], server.joined["world_size"]) == (1, 1 + replicas)


def test_server_error_of_an_ended_push_is_raised(
    server: Server, communicators: list[Communicator]
) -> None:
    server.error = ServerError("weights_refused", "a tensor holds NaN", status=422)
    sender = BroadcastSender(server, timeout_s=30)  # type: ignore[arg-type]
    server.answers.set()
    with pytest.raises(ServerError, match="holds NaN"):
        sender.push(TENSORS.items(), "v")
    assert communicators[0].aborted


@pytest.mark.parametrize(
    "error, remade",
    [
        (ServerError("channel_broken", "so it is", status=424), True),
        (ServerError("conflict", "so it is", status=409), True),
        (ServerError("too_large", "so it is", status=413), True),
        (ConnectionFailed("so it is: no reply"), True),
        (ServerError("weights_refused", "so it is", status=422), False),
        (NotLive("so it is: staged"), False),
    ],
    ids=str,
)
def test_failed_push_makes_the_sender_rejoin_the_group(
    error: Exception,
    remade: bool,
    server: Server,
    communicators: list[Communicator],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The result is the same where every byte was sent before the server said so."""
    sender = BroadcastSender(server, timeout_s=30)  # type: ignore[arg-type]
    monkeypatch.setattr(sender, "_send", lambda named, reply: None)
    server.error = error
    server.answers.set()
    with pytest.raises(type(error), match="so it is"):
        sender.push(TENSORS.items(), "v")
    server.error = None
    assert sender.push(TENSORS.items(), "v")["state"] == "committed"
    assert len(communicators) == 1 + remade


def test_receiver_of_a_silent_trainer_times_out(communicators: list[Communicator]) -> None:
    membership = Membership("g", "gloo", "127.0.0.1", 1, 0, 2, timeout_s=TIMEOUT_S)
    group = WeightGroup(membership, store=object())
    work = group.begin(torch.zeros(3))
    assert group.under_way == 1
    with pytest.raises(ChannelLost, match="takes no part"):
        group.end(work)
    assert group.under_way == 1, "until it is aborted it is on the device"
    group.close()
    assert group.under_way == 0 and communicators[0].aborted


@pytest.fixture
def port() -> int:
    """Return a port without a listener."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def joined_in_time(port: int, timeout_s: float, said: str) -> None:
    started = time.monotonic()
    why = f"broke while joining, or {timeout_s:g} s passed .*{said}.*make the group again"
    with pytest.raises(ChannelLost, match=why):
        WeightGroup(Membership("g", "gloo", "127.0.0.1", port, 1, 2, timeout_s=timeout_s))
    assert timeout_s - 0.5 <= time.monotonic() - started < timeout_s + 15


def test_join_at_a_closed_port_ends_in_its_time(port: int) -> None:
    joined_in_time(port, 3.0, "the port does not listen")


def test_join_at_a_silent_listener_ends_in_its_time(port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        joined_in_time(silent.getsockname()[1], 3.0, "no store answers there")


def test_wait_for_the_store_counts_towards_the_join_timeout(port: int) -> None:
    """The store is there after most of the time, and rank 0 never joins."""
    stores: list[Any] = []
    late = threading.Timer(1.5, lambda: stores.append(host_store("127.0.0.1", port, 2, 30)))
    late.start()
    joined_in_time(port, 2.0, "")
    late.join()
    assert stores


class Clock:
    """A clock that only the test advances, and that reports the first sleep."""

    def __init__(self) -> None:
        self.now_s, self.slept = 0.0, threading.Event()

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, wait_s: float) -> None:
        self.slept.set()
        time.sleep(wait_s)


def test_broadcast_has_its_full_time_after_a_late_join(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 joins with 200 of 600 s left, and broadcasts 500 s after rank 1 began to receive."""
    clock = Clock()
    monkeypatch.setattr(groups, "time", clock)
    joined = dict[int, WeightGroup]()

    def join(rank: int, store: Any = None) -> None:
        membership = Membership("g", "gloo", "127.0.0.1", port, rank, 2, timeout_s=600)
        joined[rank] = WeightGroup(membership, store)

    follows = threading.Thread(target=join, args=(1,))
    follows.start()
    assert clock.slept.wait(240), "rank 1 did not look for the store"
    clock.now_s = 400
    store = host_store("127.0.0.1", port, 2, 600)
    join(0, store)
    follows.join()
    received, sent = torch.zeros(3), threading.Event()
    work = joined[1].begin(received)

    def send_late() -> bool:
        if not sent.is_set():
            sent.set()
            clock.now_s += 500
            joined[0].end(joined[0].begin(torch.arange(3.0)))
        return False

    joined[1].end(work, send_late)
    assert received.tolist() == [0, 1, 2] and sent.is_set()
    assert store.timeout == joined[1]._store.timeout == timedelta(seconds=600)
    joined[1]._timeout = timedelta(seconds=0.1)
    work = joined[1].begin(received)
    until(work.is_completed, within_s=150)  # by its own time, not by what was left to join
    for group in joined.values():
        group.close()
