"""Faults on the way of a push, by every channel and at every chunk: what is live afterwards is
exactly the old or the new version.

A case spoils one chunk of one push. A chunk is what the channel moves at once: a range of a file on
disk, a body over http, a bucket in a gloo group or in shared memory. After each case the live sums
are computed again, the same request gives the same tokens and log-probs as that version always
gave, and a good push by the same channel works. With weights staged in place a third end is
allowed: nothing is generated.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.channel_server import CHUNKS, LONG_S, SHORT_S, Server, bucket_bytes, in_group
from tlt_client import ConnectionFailed, ServerError
from tlt_client.channels.broadcast import BroadcastSender
from tlt_client.channels.disk import DiskSender, write
from tlt_client.channels.errors import ChannelError, ChannelLost
from tlt_client.channels.http import HttpSender
from tlt_client.channels.ipc import OFFER, IpcSender
from tlt_client.channels.tensors import buckets, spec_of

FAULTS = ("kill", "truncate", "flip", "duplicate", "reorder", "time out")
BORDERS = (0, 9, 18)  # what make test spoils; make soak spoils every chunk


Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("staged"))
    yield server
    server.runner.close()


@pytest.fixture(scope="module")
def in_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("place"), staging="none")
    yield server
    server.runner.close()


class Killed(Exception):
    """The sender is gone."""


def by_disk(server: Server, fault: str, at: int) -> None:
    version = next(server.versions)
    directory = server.root / "weights" / version
    directory.mkdir()
    entries = write(server.new.items(), directory, max_file_bytes=2**14)
    files = sorted(directory.glob("*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    chunk = -(-sum(sizes) // CHUNKS)
    index = next(i for i in range(len(files)) if sum(sizes[: i + 1]) > at * chunk)
    file, start = files[index], at * chunk - sum(sizes[:index])
    data = file.read_bytes()
    piece = data[start : start + chunk]
    if fault == "kill":  # what was not written yet is not there
        file.write_bytes(data[:start])
        for later in files[index + 1 :]:
            later.unlink()
    elif fault == "truncate":
        file.write_bytes(data[:start] + data[start + chunk :])
    elif fault == "flip":
        file.write_bytes(data[:start] + bytes([piece[0] ^ 1 << at % 8]) + data[start + 1 :])
    elif fault == "duplicate":
        file.write_bytes(data[:start] + piece + piece + data[start + chunk :])
    elif fault == "reorder":
        file.write_bytes(
            data[:start]
            + piece[len(piece) // 2 :]
            + piece[: len(piece) // 2]
            + data[start + chunk :]
        )
    else:  # the writer has stalled before this chunk and writes it while the server reads
        transaction, reads = server.engine.engine.pushes.transaction, itertools.count()

        def late(phase: str) -> None:
            if phase == "read" and next(reads) == 1:
                with open(file, "r+b") as opened:
                    opened.seek(start)
                    opened.write(bytes(len(piece)))

        transaction.on_phase, before = late, transaction.on_phase
    try:
        server.push_weights(version, path=str(directory), tensors=entries)
    finally:
        if fault == "time out":
            transaction.on_phase = before
        shutil.rmtree(directory)


class Wire:
    """A server whose connection spoils the chunk `at`."""

    def __init__(self, server: Server, fault: str, at: int) -> None:
        self._server, self._fault, self._at, self._count, self._held = server, fault, at, 0, None
        self.push_weights, self.weights_part = server.push_weights, server.weights_part

    def put_weights(self, version: str, part: str, data: bytes, *, start: int, total: int) -> Any:
        count, self._count = self._count, self._count + 1
        put = self._server.put_weights
        if count != self._at:
            return put(version, part, data, start=start, total=total)
        if self._fault == "kill":
            raise Killed
        if self._fault == "truncate":
            put(version, part, data[: len(data) // 2], start=start, total=total)
            raise ConnectionFailed("the connection broke in the middle of a chunk")
        if self._fault == "flip":
            data = data[:7] + bytes([data[7] ^ 1 << self._at % 8]) + data[8:]
        if self._fault == "duplicate":
            put(version, part, data, start=start, total=total)
        # The next chunk overtakes this one.
        if self._fault == "reorder" and start + len(data) < total:
            put(version, part, bytes(8), start=start + len(data), total=total)
        if self._fault == "time out":
            put(version, part, data, start=start, total=total)
            raise ConnectionFailed("the reply did not come in time")
        return put(version, part, data, start=start, total=total)


def by_http(server: Server, fault: str, at: int) -> None:
    version = next(server.versions)
    size = sum(tensor.nbytes for tensor in server.new.values())
    sender = HttpSender(
        Wire(server, fault, at),
        max_file_bytes=2**14,
        chunk_bytes=size // CHUNKS,
        sleep=lambda s: None,
    )  # type: ignore[arg-type]
    try:
        sender.push(server.new.items(), version)
    finally:
        server.runner.run(_drop(server, version))


async def _drop(server: Server, version: str) -> None:
    server.uploads.drop(version)


class Spoiled(BroadcastSender):
    fault, at = "", 0

    def _send(self, named: list[tuple[str, torch.Tensor]], reply: Any) -> None:
        data = dict(named)
        specs = [spec_of(name, str(tensor.dtype), tensor.shape) for name, tensor in named]
        cut = buckets(specs, self._bucket_bytes)
        messages = [
            torch.cat([data[s.name].reshape(-1).view(torch.uint8) for s in bucket])
            for bucket in cut
        ]
        at = self.at * len(messages) // CHUNKS
        if self.fault == "kill":
            del messages[at:]
        elif self.fault == "truncate":
            messages[at] = messages[at][: len(messages[at]) // 2]
        elif self.fault == "flip":
            messages[at][len(messages[at]) // 2] ^= 1 << self.at % 8
        elif self.fault == "duplicate":
            messages.insert(at, messages[at])
        elif self.fault == "reorder":
            messages.insert(at, messages.pop((at + 1) % len(messages)))
        works = []
        for index, message in enumerate(messages):
            if self.fault == "time out" and index == at:
                wait([reply], LONG_S)  # until the engine has given up
            works.append((message, self._group.begin(message)))
        for _, work in works:
            self._group.end(work)
        if self.fault == "kill":
            self._group.close()


def by_broadcast(server: Server, fault: str, at: int) -> None:
    # In these two one end waits for what never comes.
    timeout_s = SHORT_S if fault in ("duplicate", "time out") else LONG_S
    sender = in_group(server, Spoiled, timeout_s, bucket_bytes=bucket_bytes(server), checksums=True)
    sender.fault, sender.at = fault, at
    try:
        sender.push(server.new.items(), next(server.versions))
    finally:
        sender._group.close()


class Faulty(IpcSender):
    fault, at, held = "", 0, b""
    reply: Future[Any]

    def _connected(self, directory: Path, name: str, reply: Future[Any]) -> Any:
        self.reply = reply
        return super()._connected(directory, name, reply)

    def _offer(self, line: Any, memory: Any, sequence: int, start: int, size: int) -> None:
        message = OFFER.pack(sequence, start, size)
        if sequence != self.at:
            line.send(message)
            if self.held:
                line.send(self.held)
        elif self.fault == "kill":
            line.close()
            raise ChannelLost("the trainer is gone")
        elif self.fault == "truncate":
            line.send(
                message[: len(message) // 2]
                if sequence % 2
                else OFFER.pack(sequence, start, size // 2)
            )
        elif self.fault == "reorder":
            self.held = message
        else:
            if self.fault == "flip":
                memory.view[start + size // 2] ^= 1 << sequence % 8
            if self.fault == "time out":
                wait([self.reply], LONG_S)
            for _ in range(2 if self.fault == "duplicate" else 1):
                line.send(message)


def by_ipc(server: Server, fault: str, at: int) -> None:
    server.engine.engine.pushes.transaction.options.intake.groups.timeout_s = (
        SHORT_S if fault == "time out" else LONG_S
    )
    sender = Faulty(server, bucket_bytes=bucket_bytes(server), checksums=True)  # type: ignore[arg-type]
    sender.fault, sender.at = fault, at * count_of_buckets(server) // CHUNKS
    if fault == "reorder":
        sender.at = min(sender.at, count_of_buckets(server) - 2)
    sender.push(server.new.items(), next(server.versions))


def count_of_buckets(server: Server) -> int:
    return len(
        list(
            buckets(
                [
                    spec_of(name, str(tensor.dtype), tensor.shape)
                    for name, tensor in server.new.items()
                ],
                bucket_bytes(server),
            )
        )
    )


CHANNELS = {"disk": by_disk, "http": by_http, "broadcast": by_broadcast, "ipc": by_ipc}


CASES = [
    pytest.param(channel, fault, at, marks=() if at in BORDERS else pytest.mark.soak)
    for channel in CHANNELS
    for fault in FAULTS
    for at in range(CHUNKS)
]
IN_PLACE = [  # each channel with each fault, at one border of three
    pytest.param(channel, fault, at, marks=() if at == BORDERS[(c + f) % 3] else pytest.mark.soak)
    for c, channel in enumerate(CHANNELS)
    for f, fault in enumerate(FAULTS)
    for at in range(CHUNKS)
]


def ended(server: Server, channel: str, fault: str, at: int) -> str:
    """Return what is live after this case; a push that failed said why."""
    before = server.check(speaks=False)
    try:
        CHANNELS[channel](server, fault, at)
    except (ServerError, ChannelError) as error:
        assert len(str(error)) > 40
        after = server.check()
        # A duplicate of the last bucket: all had come, and one too many.
        assert after in (before, "quarantined") or fault == "duplicate"
        return after
    except Killed:
        assert server.check() == before
        return before
    return server.check()


def restore(server: Server, channel: str) -> None:
    """A good push by the same channel, then the old version again."""
    good = next(server.versions)
    if channel == "disk":
        reply = DiskSender(server, server.root / "weights").push(server.old.items(), good)  # type: ignore[arg-type]
    elif channel == "http":
        reply = HttpSender(server).push(server.old.items(), good)  # type: ignore[arg-type]
    elif channel == "ipc":
        reply = IpcSender(server).push(server.old.items(), good)  # type: ignore[arg-type]
    else:
        sender = in_group(server, BroadcastSender, LONG_S)
        reply = sender.push(server.old.items(), good)
        sender.close()
    assert reply["state"] == "committed" and server.check(speaks=False) == "old"


# Resumed, or the same bytes again.
GETS_THROUGH = {("http", fault) for fault in ("truncate", "duplicate", "time out")}


@pytest.mark.parametrize("channel, fault, at", CASES)
def test_channel_fault_leaves_the_old_or_the_new_version(
    channel: str, fault: str, at: int, staged: Server
) -> None:
    end = ended(staged, channel, fault, at)
    if (channel, fault) in GETS_THROUGH:
        assert end == "new"
    elif (channel, fault) not in {
        ("http", "reorder"),
        ("disk", "time out"),
        ("broadcast", "duplicate"),
    }:  # a late one may come too late
        assert end == "old"
    restore(staged, channel)


@pytest.mark.parametrize("channel, fault, at", IN_PLACE)
def test_in_place_fault_leaves_old_or_new_or_quarantines(
    channel: str, fault: str, at: int, in_place: Server
) -> None:
    assert ended(in_place, channel, fault, at) in ("old", "new", "quarantined")
    restore(in_place, channel)


def test_in_place_fault_quarantines_only_after_the_first_write(in_place: Server) -> None:
    assert ended(in_place, "http", "flip", CHUNKS - 1) == "quarantined"
    report = in_place.engine.push(in_place.root / "nowhere", "v")
    assert report.result == "forbidden"
    assert list(report.state.quarantined) == ["target"]
    assert in_place.check() == "quarantined"
    assert in_place.engine.roll_back().result == "conflict"
    restore(in_place, "http")
    assert in_place.engine.push(in_place.root / "weights", "v").result == "weights_refused"
    assert in_place.check() == "old"


def test_each_channel_has_enough_cases_and_chunks(staged: Server) -> None:
    assert len(CASES) >= 300
    assert count_of_buckets(staged) >= 8
