"""Memory, a disk or patience ends in the middle of a push by a group: nothing stays on the wire
that the next push takes for its own, the error says to send again and not to ask again, and the
next push by the same sender works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.engine.channel_server import LONG_S, Server, bucket_bytes, in_group
from tlt_client import ServerError
from tlt_client.channels.broadcast import BroadcastReceiver, BroadcastSender
from tlt_client.channels.ipc import IpcSender
from tlt_server.weights import arriving
from tlt_server.weights.spool import Spool


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("exhausted"))
    yield server
    server.runner.close()


@pytest.fixture
def sender(server: Server) -> Iterator[BroadcastSender]:
    sender = in_group(server, BroadcastSender, LONG_S, bucket_bytes=bucket_bytes(server))
    yield sender
    sender.close()
    assert not server.weights_groups()


class Once:
    """Raises at one of its calls, or from then on."""

    def __init__(
        self, sound: Callable[..., Any], error: Exception, at: int, *, on: bool = False
    ) -> None:
        self._sound, self._error, self._at, self._on, self._count = sound, error, at, on, 0

    def __call__(self, *given: Any) -> Any:
        self._count += 1
        if self._count == self._at or (self._on and self._count > self._at):
            raise self._error
        return self._sound(*given)


def refused(server: Server, sender: Any) -> ServerError:
    """Return the error of a push of the new version; the old one stays live."""
    with pytest.raises(ServerError) as caught:
        sender.push(server.new.items(), next(server.versions))
    assert server.check() == "old"
    return caught.value


def works(server: Server, sender: Any) -> None:
    for tensors, name in ((server.new, "new"), (server.old, "old")):
        assert (
            sender.push(tensors.items(), next(server.versions))["state"] == "committed"
            and server.check() == name
        )


SAID = {
    "gpu": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand more"),
    "python": MemoryError(),
    "cpu": RuntimeError(
        "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 8 bytes."
    ),
}


@pytest.mark.parametrize("said", SAID)
def test_memory_that_ends_while_a_tensor_is_checked_breaks_no_group(
    said: str, server: Server, sender: BroadcastSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(arriving, "contents", Once(arriving.contents, SAID[said], 2))
        error = refused(server, sender)
    assert (error.code, error.status, error.retryable) == ("channel_broken", 424, False)
    for word in (
        "memory ran out",
        "bucket_bytes",
        "--weight-staging host or disk",
        "--memory-fraction",
        "send again",
    ):
        assert word in error.message
    assert "and more" not in error.message
    works(server, sender)


@pytest.mark.parametrize("at", [1, 2, 5])
def test_memory_that_ends_for_good_in_the_receiver_breaks_the_group_and_the_next_join_works(
    at: int, server: Server, sender: BroadcastSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        sound = BroadcastReceiver._buffer
        buffer = Once(lambda receiver, size: sound(receiver, size), SAID["gpu"], at, on=True)
        patched.setattr(BroadcastReceiver, "_buffer", lambda receiver, size: buffer(receiver, size))
        error = refused(server, sender)
    assert (error.code, error.retryable) == ("channel_broken", False)
    assert (
        "could not take what was still on its way" in error.message
        and "make the group again" in error.message
    )
    assert "Before that: memory ran out" in error.message and "bucket_bytes" in error.message
    assert sender._group.broken
    works(server, sender)


def test_a_state_directory_that_is_full_before_anything_is_received_leaves_the_group(
    server: Server, sender: BroadcastSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(
            Spool, "begin", Once(Spool.begin, OSError(28, "No space left on device"), 1)
        )
        error = refused(server, sender)
    assert (error.code, error.retryable) == (
        "channel_broken",
        False,
    ) and "No space left" in error.message
    assert not server.weights_groups()
    works(server, sender)


def test_a_manifest_that_is_refused_at_once_leaves_nothing_on_the_wire(
    server: Server, sender: BroadcastSender
) -> None:
    (name, tensor), *_ = server.new.items()
    with pytest.raises(
        ServerError, match="twice"
    ) as caught:  # a trainer that does not look itself, as `push` does
        sender._push([*server.new.items(), (name, tensor)], next(server.versions))
    assert caught.value.code == "weights_refused" and server.check() == "old"
    works(server, sender)


def test_memory_that_ends_in_a_push_by_ipc_may_be_asked_for_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = IpcSender(server, bucket_bytes=bucket_bytes(server))  # type: ignore[arg-type]
    with monkeypatch.context() as patched:
        patched.setattr(arriving, "contents", Once(arriving.contents, SAID["gpu"], 2))
        error = refused(server, sender)
    assert error.code == "push_failed" and "bucket_bytes" in error.message
    works(server, sender)
