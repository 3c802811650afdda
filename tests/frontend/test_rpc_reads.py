"""Messages that are read: how many at once, how little a stalled one keeps others out, and what
memory each takes, right or wrong.
"""

import asyncio
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import msgspec
import pytest

from tests.frontend.live_server import live_server
from tests.frontend.test_reading_process import run
from tests.frontend.test_rpc import SHORT, raw, refused
from tests.waiting import in_loop, until
from tlt_client.rpc import GenerateRequest, Item, RolloutServiceStub, SamplingFields
from tlt_server.errors import InvalidRequest, TooLarge, Unavailable
from tlt_server.frontend.http.slices import json_slices
from tlt_server.frontend.reading import asking
from tlt_server.frontend.reading.asking import Asker
from tlt_server.frontend.reading.reader import Reader
from tlt_server.frontend.rpc import exchange
from tlt_server.frontend.rpc.exchange import MessageReads
from tlt_server.frontend.rpc.messages import MAX_NUMBERS, parsed, plain, read
from tlt_server.frontend.rpc.methods import METHODS


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "OTHERS_S", 0.05)
    monkeypatch.setattr(exchange, "OWN_S", 0.2)
    monkeypatch.setattr(exchange, "CHECK_S", 0.01)


class Messages:
    """Reads that end when the test says so, in the order in which they began."""

    def __init__(self, at_once: int) -> None:
        self.reads, self.began = MessageReads(at_once), list[str]()
        self.arrived: dict[str, asyncio.Event] = {}

    def start(self, name: str) -> asyncio.Task[str]:
        """Read a message whose owner is the first letter of its name."""

        async def receive() -> str:
            self.began.append(name)
            await self.arrived[name].wait()
            return name

        self.arrived[name] = asyncio.Event()
        return asyncio.create_task(self.reads.read(name[0], receive))


@in_loop
async def test_free_read_slots_go_to_the_owner_with_fewest_reads() -> None:
    messages = Messages(2)
    tasks = {name: messages.start(name) for name in ("a1", "a2", "a3", "a4", "b1", "c1")}
    await asyncio.sleep(0)
    assert messages.began == ["a1", "a2"]
    tasks["a4"].cancel()  # its client leaves while it waits
    for name, began in (("a1", "b1"), ("b1", "c1"), ("a2", "a3")):
        messages.arrived[name].set()
        assert await tasks[name] == name
        await asyncio.sleep(0)
        assert messages.began[-1] == began
    messages.arrived["c1"].set()
    messages.arrived["a3"].set()
    assert await tasks["a3"] == "a3" and await tasks["c1"] == "c1"
    again = messages.start("d1")
    messages.arrived["d1"].set()
    assert await again == "d1" and messages.reads._free == 2


@in_loop
@pytest.mark.usefixtures("_impatient")
async def test_stalled_read_is_cut_only_while_other_calls_wait() -> None:
    messages = Messages(2)
    stalled = [messages.start("a1"), messages.start("a2")]
    await asyncio.sleep(0.3)
    assert not any(task.done() for task in stalled)
    other = messages.start("b1")
    messages.arrived["b1"].set()
    assert await other == "b1"
    with pytest.raises(Unavailable, match="2 messages are read at once"):
        await stalled[0]
    own = messages.start("a3")
    messages.arrived["a3"].set()
    assert await own == "a3" and not stalled[1].done()
    messages.arrived["a2"].set()
    assert await stalled[1] == "a2"


@in_loop
@pytest.mark.usefixtures("_impatient")
async def test_departed_waiting_caller_cuts_no_read() -> None:
    messages = Messages(1)
    slow, left = messages.start("a1"), messages.start("b1")
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.sleep(0.2)
    assert not slow.done()
    messages.arrived["a1"].set()
    assert await slow == "a1" and messages.reads._free == 1


@pytest.mark.usefixtures("_impatient")
def test_calls_without_a_message_block_no_other_call(model: Path) -> None:
    with live_server(model, grpc_port=0, max_body_mb=1, max_bodies_mb=4) as server:
        with grpc.insecure_channel(server.grpc_address) as channel:
            silent, replies = threading.Event(), []

            def nothing() -> Iterator[bytes]:
                silent.wait(30)
                yield from ()

            call = channel.stream_unary("/tlt.v1.RolloutService/GenerateBatch")
            for _ in range(6):
                replies.append(call.future(nothing()))
            until(lambda: any(reply.done() for reply in replies))
            assert RolloutServiceStub(channel).GenerateBatch(SHORT, timeout=20).results
            for reply in [reply for reply in replies if reply.done()]:
                assert "read at once (max_bodies_mb)" in refused(reply.result).message
            silent.set()


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
