"""The engine's half of the channel ipc, without an engine, faces trainers that do not keep to the
protocol.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tlt_client.channels import Intake, cuda
from tlt_client.channels import memory as memories
from tlt_client.channels.errors import ChannelError, ChannelLost, ContentRefused, PlaceForbidden
from tlt_client.channels.groups import Groups
from tlt_client.channels.ipc import DONE, OFFER, IpcReceiver, IpcSender
from tlt_client.channels.line import Line, entered, made_directory
from tlt_client.channels.memory import (
    GRANT,
    Grant,
    SharedGpuMemory,
    SharedHostMemory,
    SharedMemory,
    check_inside,
    opened,
    share,
)
from tlt_server.wire.commands import Manifest, TensorEntry

CPU = torch.device("cpu")
TENSORS = [
    TensorEntry(name="a", dtype="float32", shape=[3]),
    TensorEntry(name="b", dtype="bfloat16", shape=[5]),
]  # 12 and 10 bytes
PUSH = Manifest(version="v", channel="ipc", path="here", tensors=TENSORS, bucket_bytes=1)
TIMEOUT_S = 2.0


@pytest.fixture
def intake(tmp_path: Path) -> Intake:
    sockets = tmp_path / ("longer than the name of a socket may be " * 4)
    sockets.mkdir(mode=0o700)
    return Intake(sockets=sockets, groups=Groups(TIMEOUT_S))


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    memory = share(64, CPU)
    yield memory
    memory.close()


def received(
    intake: Intake, act: Callable[[socket.socket], object], push: Manifest = PUSH
) -> list[dict[str, torch.Tensor]]:
    """Return the tensors received from a trainer with this behaviour."""
    receiver = IpcReceiver(push, intake)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        directory = os.open(intake.sockets or "", os.O_RDONLY)
        connection.connect(f"/proc/self/fd/{directory}/{push.path}")
        os.close(directory)
        thread = threading.Thread(target=act, args=(connection,))
        thread.start()
        try:
            batches = [
                {name: tensor.clone() for name, tensor in batch.tensors.items()}
                for batch in receiver.batches()
            ]
            receiver.confirm()
        finally:
            receiver.close()
            thread.join()
    assert intake.sockets is not None and list(intake.sockets.iterdir()) == []
    return batches


def say(
    *messages: bytes,
    memory: SharedMemory | None = None,
    grant: bytes = b"",
    descriptors: Sequence[int] = (),
) -> Callable[[socket.socket], None]:
    """Grant this memory, or anything else, and send the messages."""
    if memory is not None:
        grant, descriptors = memory.grant.packed(), memory.descriptors

    def act(connection: socket.socket) -> None:
        socket.send_fds(connection, [grant], list(descriptors))
        for message in messages:
            connection.send(message)

    return act


def test_buckets_are_copied_from_any_place_in_shared_memory(
    intake: Intake, memory: SharedMemory
) -> None:
    a = torch.tensor([1.0, -2.0, 3.0])
    b = torch.tensor([0.5, 1.5, 2.5, 3.5, 4.5], dtype=torch.bfloat16)
    memory.view[7:19], memory.view[54:64] = a.view(torch.uint8), b.view(torch.uint8)
    acknowledged = []

    def act(connection: socket.socket) -> None:
        say(OFFER.pack(0, 7, 12), OFFER.pack(1, 54, 10), memory=memory)(connection)
        acknowledged.extend(DONE.unpack(connection.recv(100))[0] for _ in range(2))
        connection.shutdown(socket.SHUT_WR)

    first, second = received(intake, act)
    assert first.keys() == {"a"} and torch.equal(first["a"], a)
    assert second.keys() == {"b"} and torch.equal(second["b"], b)
    assert acknowledged == [0, 1]


@pytest.mark.parametrize(
    ("offers", "said"),
    [
        ([(1, 0, 12)], "instead of bucket 0 of 12 bytes"),
        ([(0, 0, 11)], "instead of bucket 0 of 12 bytes"),
        ([(0, 53, 12)], "12 bytes from 53 on of 64"),
        ([(0, 2**64 - 1, 12)], "of 64"),
        ([(0, 0, 12), (0, 0, 12)], "instead of bucket 1 of 10 bytes"),
        ([(0, 0, 12), (1, 0, 10), (1, 0, 10)], "more buckets than the manifest names"),
    ],
)
def test_ipc_offer_outside_the_declared_bytes_is_refused(
    offers: list[tuple[int, int, int]], said: str, intake: Intake, memory: SharedMemory
) -> None:
    with pytest.raises(ContentRefused, match=said):
        received(intake, say(*[OFFER.pack(*offer) for offer in offers], memory=memory))


@pytest.mark.parametrize(
    ("message", "said"),
    [(b"short", "5 bytes came instead of 24"), (bytes(100), "25 bytes came instead of 24")],
)
def test_ipc_message_of_a_wrong_length_breaks_the_push(
    message: bytes, said: str, intake: Intake, memory: SharedMemory
) -> None:
    with pytest.raises(ChannelLost, match=said):
        received(intake, say(message, memory=memory))


def resizable(size: int) -> int:
    descriptor = os.memfd_create("resizable")
    os.ftruncate(descriptor, size)
    return descriptor


GRANTED = Grant(1, bytes(16), bytes(64), 64)


@pytest.mark.parametrize(
    ("grant", "make", "said"),
    [
        (GRANTED, lambda: [resizable(64)], "can still be resized"),
        (GRANTED, lambda: [os.dup(share(32, CPU).descriptors[0])], "32 bytes .* granted with 64"),
        (GRANTED, lambda: [os.open("/dev/null", os.O_RDONLY)], "send one of a memory file"),
        (GRANTED, list, "0 descriptors"),
        (GRANTED._replace(kind=7), list, r"kind 7, known are \[1, 2\]"),
        (GRANTED._replace(kind=2), list, "on GPU 00000000-0000"),
    ],
)
def test_unsafe_shared_memory_is_refused(
    grant: Grant, make: Callable[[], list[int]], said: str, intake: Intake
) -> None:
    descriptors = make()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ContentRefused, match=said):
        received(intake, say(grant=grant.packed(), descriptors=descriptors))
    assert len(os.listdir("/proc/self/fd")) == before, "what came with the message is closed"
    for descriptor in descriptors:
        os.close(descriptor)


def test_ipc_grant_of_a_different_protocol_is_refused(intake: Intake) -> None:
    with pytest.raises(ContentRefused, match="begins with b'NOPE'"):
        received(intake, say(grant=b"NOPE" + bytes(GRANT.size - 4)))


def test_ipc_push_of_a_silent_or_absent_trainer_times_out(
    intake: Intake, memory: SharedMemory
) -> None:
    intake.groups.timeout_s = 0.5
    with pytest.raises(ChannelLost, match=r"0\.5 s passed"):
        received(intake, say(memory=memory))
    receiver = IpcReceiver(PUSH, intake)
    with pytest.raises(ChannelLost, match="no trainer used"):
        next(receiver.batches())
    receiver.close()


@pytest.mark.parametrize("path", ["../here", "a/b", "", ".", "x" * 65, "a\0b", "sp ace"])
def test_ipc_socket_path_stays_inside_its_directory(path: str, intake: Intake) -> None:
    with pytest.raises(PlaceForbidden, match="socket's name"):
        IpcReceiver(Manifest(version="v", channel="ipc", path=path, tensors=TENSORS), intake)


def test_existing_socket_is_not_taken_over(intake: Intake) -> None:
    first = IpcReceiver(PUSH, intake)
    with pytest.raises(ChannelLost, match="push by another name"):
        IpcReceiver(PUSH, intake)
    first.close()


def test_directory_open_to_other_users_fails_at_both_ends(intake: Intake) -> None:
    assert intake.sockets is not None
    intake.sockets.chmod(0o750)
    with pytest.raises(PlaceForbidden, match="mode 750"):
        entered(intake.sockets)
    with pytest.raises(ChannelLost, match="on one host"):
        entered(intake.sockets / "nowhere")
    assert made_directory().stat().st_mode & 0o777 == 0o700


def test_peer_of_a_different_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with one, other, pytest.raises(PlaceForbidden, match="as 4711"):
        Line(one, 1.0)


def test_writes_of_a_reader_do_not_reach_the_senders_memory(memory: SharedMemory) -> None:
    mine = SharedHostMemory.open(memory.grant, memory.descriptors)
    memory.view[5] = 9
    assert mine.view[5] == 9
    mine.view[5] = 1
    assert memory.view[5] == 9
    mine.close()


class Closed:
    """A server without the channel."""

    def weights(self) -> dict[str, Any]:
        return {"sockets": ""}


def test_ipc_push_to_a_server_without_ipc_fails_before_sending() -> None:
    with pytest.raises(ChannelError, match="ipc among its --weight-channels"):
        IpcSender(Closed()).push([("a", torch.zeros(3))], "v")  # type: ignore[arg-type]


def test_ipc_message_structs_have_no_padding() -> None:
    assert (GRANT.size, OFFER.size, DONE.size) == (4 + 4 + 16 + 64 + 8, 24, 8)
    assert struct.calcsize(GRANT.format) == GRANT.size


def test_granted_gpu_range_must_lie_inside_its_allocation() -> None:
    allocated = cuda.Range(1000, 96)
    for granted in ((1000, 96), (1000, 1), (1032, 64)):
        check_inside(cuda.Range(*granted), allocated)
    for granted in ((1000, 97), (1032, 65), (999, 8), (1096, 1), (1000, 0), (1000, 2**63)):
        with pytest.raises(ContentRefused, match="grant no more than is allocated"):
            check_inside(cuda.Range(*granted), allocated)


@pytest.mark.parametrize(
    "found", [cuda.Range(4096, 64), RuntimeError("cuMemGetAddressRange failed (201)")], ids=str
)
def test_gpu_memory_smaller_than_its_grant_is_closed_unread(
    found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[int] = []

    def allocation(pointer: int) -> cuda.Range:
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(cuda, "opened", lambda handle: 4096)
    monkeypatch.setattr(cuda, "allocation", allocation)
    monkeypatch.setattr(cuda, "close", closed.append)
    monkeypatch.setattr(memories, "_uuid", lambda index: bytes(16))
    said = "65 bytes of a GPU's memory were granted.*has 64|AddressRange failed.*another channel"
    with pytest.raises(ChannelError, match=said):
        opened(Grant(SharedGpuMemory.kind, bytes(16), bytes(64), 65), [])
    assert closed == [4096]
