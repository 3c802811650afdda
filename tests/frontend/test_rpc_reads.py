"""Messages that are read at once are bounded, and one that stalls keeps out no other key."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.frontend.live_server import live_server
from tests.frontend.test_rpc import SHORT, refused
from tests.waiting import in_loop, until
from tlt_client.rpc import RolloutServiceStub
from tlt_server.errors import Unavailable
from tlt_server.frontend.rpc import exchange
from tlt_server.frontend.rpc.exchange import MessageReads


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
async def test_free_turns_go_to_the_owner_reading_least() -> None:
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
async def test_a_stalled_read_is_cut_only_while_others_wait() -> None:
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
async def test_no_read_is_cut_for_a_departed_caller() -> None:
    messages = Messages(1)
    slow, left = messages.start("a1"), messages.start("b1")
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.sleep(0.2)
    assert not slow.done()
    messages.arrived["a1"].set()
    assert await slow == "a1" and messages.reads._free == 1


@pytest.mark.usefixtures("_impatient")
def test_calls_without_a_message_keep_no_other_out(model: Path) -> None:
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
