"""Streams of health and reflection that make room for another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc

from tests.waiting import in_loop
from tlt_server.frontend.rpc.health import SideStreams


class Aborted(Exception):
    pass


class Call:
    """A context of gRPC whose client reads nothing after the first `reads` messages."""

    def __init__(self, reads: int) -> None:
        self.reads, self.told = reads, list[str]()
        self.over = asyncio.Event()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def send_initial_metadata(self, metadata: Any) -> None:
        self.told.append("metadata")

    async def write(self, message: str) -> None:
        if self.reads == 0:
            try:
                await self.over.wait()
            except asyncio.CancelledError:
                self.told.append("cut in the core" if not self.over.is_set() else "ended")
                raise
        self.reads -= 1
        self.told.append(message)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.told.append(code.name)
        self.over.set()
        raise Aborted


async def endless(closed: list[str], name: str) -> AsyncGenerator[str, None]:
    try:
        while True:
            yield name
    finally:
        closed.append(name)


@in_loop
async def test_stuck_stream_makes_room_with_a_status() -> None:
    streams, closed = SideStreams(1), list[str]()
    old, new = Call(reads=2), Call(reads=1)
    first = asyncio.create_task(streams.send(old, endless(closed, "a")))  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    second = asyncio.create_task(streams.send(new, endless(closed, "b")))  # type: ignore[arg-type]
    done, _ = await asyncio.wait({first}, timeout=10)
    assert done and isinstance(first.exception(), Aborted)
    assert old.told == ["metadata", "a", "a", "RESOURCE_EXHAUSTED", "ended"]
    assert closed == ["a"] and not second.done()
    second.cancel()  # its client leaves
    await asyncio.wait({second})
    assert second.cancelled() and closed == ["a", "b"] and streams._open == {}


@in_loop
async def test_an_ended_or_failed_stream_gives_its_place_back() -> None:
    async def failing() -> AsyncGenerator[str, None]:
        yield "a"
        raise ValueError("no more")

    streams, call = SideStreams(1), Call(reads=9)
    try:
        await streams.send(call, failing())  # type: ignore[arg-type]
    except ValueError as error:
        assert str(error) == "no more"
    else:
        raise AssertionError("the failure was lost")
    assert call.told == ["metadata", "a"] and streams._open == {}
