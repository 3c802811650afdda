"""Messages, right or wrong, hold a few times their size in memory, and only while they are read."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path

import grpc
import msgspec
import pytest

from tests.frontend.live_server import live_server
from tests.frontend.test_reading_process import run
from tests.frontend.test_rpc import raw, refused
from tlt_client.rpc import GenerateRequest, Item, SamplingFields
from tlt_server.errors import InvalidRequest, TooLarge
from tlt_server.frontend.http.slices import json_slices
from tlt_server.frontend.reading import asking
from tlt_server.frontend.reading.asking import Asker
from tlt_server.frontend.reading.reader import Reader
from tlt_server.frontend.rpc.messages import MAX_NUMBERS, parsed, plain, read
from tlt_server.frontend.rpc.methods import METHODS

BATCH = METHODS["/tlt.v1.RolloutService/GenerateBatch"]
MB = 2**20


def memory_mb(field: str, pid: int | None) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) / 1024


def forget_peak(pid: int | None) -> None:
    """Let the peak of a process be what it has now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def test_a_refused_message_is_freed_with_its_call(model: Path) -> None:
    hostile = b"\xff" * (8 * MB)
    with (
        live_server(model, grpc_port=0) as server,
        grpc.insecure_channel(server.grpc_address) as channel,
    ):
        call = raw(channel)
        gc.disable()  # what is freed later would be held by a cycle
        try:
            refused(lambda: call(hostile))
            before = memory_mb("VmRSS", os.getpid())
            for _ in range(16):
                refused(lambda: call(hostile))
            assert memory_mb("VmRSS", os.getpid()) < before + 64
        finally:
            gc.enable()


def test_reading_token_ids_takes_bounded_memory(model: Path) -> None:
    small, large = (
        GenerateRequest(
            requests=[Item(token_ids=[300] * 1900) for _ in range(items)]
        ).SerializeToString()
        for items in (16, 2048)
    )

    async def body_bytes(reader: Reader, message: bytes) -> int:
        asking._ASKER.set(Asker(reader, "", asyncio.Event().wait))  # type: ignore[arg-type]
        return len((await BATCH.arrive(message)).body)

    async def grown(reader: Reader) -> float:
        await body_bytes(reader, small)
        before = memory_mb("VmHWM", reader.pid)
        assert await body_bytes(reader, large) > 4 * 1900 * 2048
        return memory_mb("VmHWM", reader.pid) - before

    assert run(model, grown) < 64 + 4 * len(large) / MB


def test_too_many_numbers_are_refused_before_parsing(model: Path) -> None:
    message = GenerateRequest(requests=[Item(token_ids=bytes(MAX_NUMBERS + 1))]).SerializeToString()

    async def arrive(reader: Reader) -> None:
        asking._ASKER.set(Asker(reader, "", asyncio.Event().wait))  # type: ignore[arg-type]
        await BATCH.arrive(message)

    with pytest.raises(TooLarge, match=f"token_ids has {MAX_NUMBERS + 1} numbers; the limit is"):
        run(model, arrive)


def test_members_of_a_message_are_read_one_at_a_time(model: Path) -> None:
    """Ids of one byte take four in an array that was grown by doubling, and two as JSON."""
    few, many = (
        GenerateRequest(requests=[Item(token_ids=[1] * 3900)] * items).SerializeToString()
        for items in (16, 4096)
    )

    async def grown(reader: Reader) -> float:
        asking._ASKER.set(Asker(reader, "", asyncio.Event().wait))  # type: ignore[arg-type]
        await BATCH.arrive(few)
        pids = (os.getpid(), reader.pid)
        for pid in pids:
            forget_peak(pid)
        before = sum(memory_mb("VmRSS", pid) for pid in pids)
        await BATCH.arrive(many)
        return sum(memory_mb("VmHWM", pid) for pid in pids) - before

    assert run(model, grown) < 64 + 4 * len(many) / MB


def test_a_message_read_by_members_equals_the_whole() -> None:
    sampling = SamplingFields(temperature=0.5, stop=["x"], logit_bias={7: 1.0, 3: -1.0})
    items = [
        Item(prompt="a" * 20_000, id="é", sampling=sampling),
        Item(token_ids=[*range(2000)], n=3),
        Item(),
    ]
    message = GenerateRequest(requests=items, sampling=sampling, priority=4)
    # Parts may come in any order, and those of a field that is no list are merged.
    shuffled = (
        GenerateRequest(sampling=SamplingFields(stop=["y"])).SerializeToString()
        + message.SerializeToString()
        + GenerateRequest(requests=[Item(prompt="b")]).SerializeToString()
    )
    for data in (message.SerializeToString(), shuffled, b""):
        whole = msgspec.json.encode(plain(parsed(GenerateRequest, data)))
        assert b"".join(json_slices(read(GenerateRequest, data))) == whole


def test_an_unknown_field_of_a_member_is_named_by_its_place() -> None:
    message = GenerateRequest(requests=[Item(prompt="a")]).SerializeToString()
    message += b"\x0a\x03\xf8\x07\x01"
    with pytest.raises(InvalidRequest, match=r"requests\[1\] has the field number 127"):
        b"".join(json_slices(read(GenerateRequest, message)))
