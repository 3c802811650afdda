"""The gateway's end of a link: broken and silent streams are deaths, and tries have pauses."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import pytest

from tests.frontend.fake_engine import INFO
from tests.frontend.gateways import FakeGateway, happens, request
from tests.waiting import in_loop
from tlt_server.errors import EngineFailed, TltError, Unavailable
from tlt_server.frontend.link import remote
from tlt_server.frontend.link.remote import reached
from tlt_server.wire.commands import Submit
from tlt_server.wire.events import Phase, Ready
from tlt_server.wire.link import (
    METHOD,
    SPARE_BYTES,
    Attach,
    Attached,
    Ended,
    LinkCommand,
    decode_link_command,
)
from tlt_server.wire.records import encode


class FakeServer(grpc.GenericRpcHandler):
    """The other end of a link, which does what a test says."""

    def __init__(self, answer: Callable[[Any, LinkCommand], Awaitable[None]]) -> None:
        self._answer = answer
        self.commands: list[LinkCommand] = []

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return (
            grpc.stream_stream_rpc_method_handler(self._serve) if details.method == METHOD else None
        )

    async def _serve(self, requests: Any, context: Any) -> None:
        async for data in requests:
            self.commands.append(command := decode_link_command(data))
            await self._answer(context, command)


async def attach(context: Any, command: LinkCommand, url: str = "http://0.0.0.0:8000") -> None:
    """Answer an `Attach`, and nothing else."""
    if isinstance(command, Attach):
        await context.write(encode([Attached(command.epoch, url)]))
        await context.write(encode([Ready(INFO)]))


@asynccontextmanager
async def linked(
    answer: Callable[[Any, LinkCommand], Awaitable[None]],
) -> AsyncIterator[tuple[FakeServer, FakeGateway, grpc.aio.Server]]:
    fake, server = FakeServer(answer), grpc.aio.server()
    server.add_generic_rpc_handlers([fake])
    gateway = FakeGateway(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    task = asyncio.create_task(gateway.link.run())
    try:
        yield fake, gateway, server
    finally:
        task.cancel()
        await asyncio.wait({task})
        await server.stop(0)


def test_silent_server_is_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PING_S", 0.1)
    monkeypatch.setattr(remote, "LASTING_S", 0.0)

    @in_loop
    async def story() -> None:
        async with linked(attach) as (_, gateway, _):
            await gateway.ready()
            await happens(lambda: [each for each, _ in gateway.deaths if each.ending == "hung"])
            death, delay_s = gateway.deaths[-1]
            assert (delay_s, death.started) == (0, set())
            assert "it was silent for 0.3 s" in death.error.message
            assert death.error.code == "engine_failed"
            await gateway.ready(times=2)  # it attaches again

    story()


@in_loop
async def test_broken_stream_is_a_death_at_once() -> None:
    async with linked(attach) as (_, gateway, server):
        await gateway.ready()
        assert gateway.member.url == "http://127.0.0.1:8000", "the host by which it was reached"
        await server.stop(0)
        await happens(lambda: gateway.deaths)
        assert gateway.deaths[0][0].ending == "exited"
        assert not gateway.link.send(Submit([request("a", [65])]))


def test_link_goes_through_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "no_grpc_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    @in_loop
    async def story() -> None:
        async with linked(attach) as (_, gateway, _):
            await happens(lambda: gateway.of(Ready) or gateway.deaths)
            assert not gateway.deaths

    story()


@in_loop
async def test_malformed_event_ends_the_stream() -> None:
    async def answer(context: Any, command: LinkCommand) -> None:
        await context.write(b"\xc1")

    async with linked(answer) as (_, gateway, _):
        await happens(lambda: gateway.deaths)
        assert "broke: MessagePack data is malformed" in gateway.deaths[0][0].error.message


def test_event_beyond_the_largest_ends_the_stream() -> None:
    for size, ends in ((SPARE_BYTES // 2, False), (SPARE_BYTES, True)):

        async def answer(context: Any, command: LinkCommand) -> None:
            await context.write(encode([Phase("load", 0.0, "x" * size)]))  # noqa: B023

        @in_loop
        async def story() -> None:
            async with linked(answer) as (_, gateway, _):
                await happens(lambda: gateway.events or gateway.deaths)
                assert not gateway.events == ends  # noqa: B023
                assert not ends or "larger than max" in gateway.deaths[0][0].error.message  # noqa: B023

        story()


@pytest.mark.parametrize(
    "url",
    [
        *("", "http://a:1 http://b:1", "http://a:1\n", "ftp://a:1", "http://key@a:1", "http://a/x"),
        *("http://[::1", "http://a:99999", "http://a:0", "http://" + "a" * 250 + ":1"),
    ],
)
def test_url_that_is_no_source_ends_the_stream(url: str) -> None:
    @in_loop
    async def story() -> None:
        async with linked(partial(attach, url=url)) as (_, gateway, _):
            await happens(lambda: gateway.deaths)
            assert not gateway.member.url and not gateway.of(Ready)

    story()


@in_loop
async def test_commands_for_an_engine_that_died_are_not_sent() -> None:
    async def answer(context: Any, command: LinkCommand) -> None:
        await attach(context, command)
        if isinstance(command, Submit):
            died = Ended("engine_failed", "it is gone", "exited", ["a"], 1.5, 2.5)
            await context.write(encode([died]))

    async with linked(answer) as (fake, gateway, _):
        await gateway.ready()
        gateway.submit(request("a", [65]))
        await happens(lambda: gateway.deaths)
        [(death, restart_in_s)] = gateway.deaths
        assert (death.started, restart_in_s) == ({"a"}, 1.5) and "it is gone" in death.error.message
        await gateway.ready(times=2)
        kinds = [type(each).__name__ for each in fake.commands]
        assert [kind for kind in kinds if kind != "Ping"] == ["Attach", "Submit", "Attach"]


def test_tries_have_growing_pauses_until_one_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(remote, "MAX_DELAY_S", 0.03)
    monkeypatch.setattr(remote, "LASTING_S", 1e9)

    @in_loop
    async def story() -> None:
        async with linked(attach) as (_, gateway, server):
            await gateway.ready()
            await server.stop(0)
            await happens(lambda: len(gateway.deaths) > 4)
            assert [delay_s for _, delay_s in gateway.deaths[:5]] == [0.01, 0.02, 0.03, 0.03, 0.03]
            assert {death.ending for death, _ in gateway.deaths[1:]} == {"not_launched"}

    story()


def test_url_of_all_addresses_names_the_reached_host() -> None:
    for url, address, expected in (
        ("http://0.0.0.0:8000", "node-3:9000", "http://node-3:8000"),
        ("https://[::]:8000", "[fd00::3]:9000", "https://[fd00::3]:8000"),
        ("http://10.0.0.7:8000", "node-3:9000", "http://10.0.0.7:8000"),
    ):
        assert reached(url, address) == expected


class EndedCall:
    """A call that its server has ended, which each further write meets, as gRPC's does."""

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    def stream_stream(self, method: str) -> Any:
        return lambda metadata: self

    async def write(self, message: bytes) -> None:
        raise asyncio.InvalidStateError("RPC already finished.")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        await asyncio.sleep(0.01)
        yield encode([Ended("conflict", "held by another")])


@in_loop
async def test_write_to_an_ended_stream_hides_no_reason() -> None:
    gateway = FakeGateway("r:1")
    gateway.link._channel = EndedCall  # type: ignore[method-assign,assignment]
    ended = await gateway.link._live()
    assert (ended.code, ended.message) == ("conflict", "held by another")


@pytest.mark.parametrize(("error", "blames"), [(Unavailable, False), (EngineFailed, True)])
@in_loop
async def test_server_that_drains_blames_no_request(error: type[TltError], blames: bool) -> None:
    async def live() -> Ended:
        return Ended(error.code, "over")

    gateway = FakeGateway("r:1")
    gateway.link._live = live  # type: ignore[method-assign]
    task = asyncio.create_task(gateway.link.run())
    await happens(lambda: gateway.deaths)
    task.cancel()
    assert gateway.blames is blames
