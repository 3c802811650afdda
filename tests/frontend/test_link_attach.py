"""Gateways that may attach to a server, by keys, epochs and fleets, and hostile or slow peers."""

import asyncio
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec
import pytest
import structlog

from tests.frontend.fake_engine import HANGS
from tests.frontend.gateways import attached, happens, on_link, refusal, request
from tests.frontend.live_server import LiveServer, live_server
from tests.frontend.test_tls import Issuer
from tlt_client import Tls
from tlt_server.errors import StartupError, TltError
from tlt_server.frontend.http.connections import LINK_CONNECTIONS
from tlt_server.frontend.rpc import link as rpc_link
from tlt_server.frontend.rpc.link import EPOCHS, MAX_FLEETS, FleetEpochs
from tlt_server.wire.commands import Command, HandOver, Stop, Submit
from tlt_server.wire.events import Phase, Ready
from tlt_server.wire.link import METHOD, Attach, Ping
from tlt_server.wire.records import encode

FIRST = Attach(fleet="f", epoch=1)
KEYS = "data scopes=data,push-weights,operate name=data\nlinked scopes=link name=gateway\n"


@on_link()
async def test_lower_epoch_is_refused_and_a_higher_one_takes_over(server: LiveServer) -> None:
    async with attached(server, epoch=5) as gateway:
        gateway.submit(request("a", [65, HANGS]))
        await happens(lambda: server.engine.running)
        error = await refusal(server.link_address, Attach(fleet="f", epoch=4))
        assert error.code == "conflict" and "epoch 4 of the fleet f is over" in error.message
        assert not gateway.deaths
        async with attached(server, epoch=6):
            await happens(lambda: gateway.deaths)
            [(death, _), *_] = gateway.deaths
            assert "epoch 6 of the fleet f has attached" in death.error.message
            assert death.ending == "exited" and not death.started
            await happens(lambda: not server.engine.running)
            await happens(lambda: len(gateway.deaths) > 1)  # it tries again, and gets nothing
            assert "epoch 5 of the fleet f is over" in gateway.deaths[1][0].error.message
            assert len(gateway.of(Ready)) == 1


@on_link()
async def test_same_epoch_replaces_the_stream_that_it_lost(server: LiveServer) -> None:
    async with attached(server, epoch=2) as before, attached(server, epoch=2):
        await happens(lambda: before.deaths)


@on_link()
async def test_foreign_fleet_is_refused_by_name_unless_it_takes_over(server: LiveServer) -> None:
    async with attached(server) as holder:
        error = await refusal(server.link_address, Attach(fleet="g", epoch=9))
        assert error.code == "conflict" and not holder.deaths
        assert "held by http://g:8000 of the fleet f" in error.message
        assert "--take-over" in error.message
        async with attached(server, fleet="g", take_over=True) as successor:
            assert successor.of(Ready)
            await happens(lambda: holder.deaths)
            assert server.client.relay is not None
            assert "the fleet g" in server.client.relay.gateway
            assert "the fleet g" in holder.deaths[0][0].error.message


@on_link()
async def test_displaced_gateway_does_not_take_over_again(server: LiveServer) -> None:
    async with (
        attached(server, take_over=True) as first,
        attached(server, fleet="g", take_over=True) as second,
    ):
        await happens(lambda: len(first.deaths) > 1)
        assert len(first.of(Ready)) == len(second.of(Ready)) == 1 and not second.deaths


def test_highest_epoch_survives_a_restart_of_the_server(model: Path, tmp_path: Path) -> None:
    async def begins(server: LiveServer) -> None:
        async with attached(server, epoch=7):
            pass

    async def refuses(server: LiveServer) -> None:
        error = await refusal(server.link_address, Attach(fleet="f", epoch=6))
        assert "epoch 7 has attached" in error.message

    for story in (begins, refuses):
        with live_server(model, link_port=0, state_dir=tmp_path) as server:
            server.run(story(server))
    assert (tmp_path / EPOCHS).stat().st_mode & 0o777 == 0o600


def test_epochs_of_the_last_fleets_are_kept(tmp_path: Path) -> None:
    epochs = FleetEpochs(tmp_path)
    for number in range(MAX_FLEETS + 1):
        epochs.note(f"f{number}", 3)
    epochs.note("f1", 4)
    again = FleetEpochs(tmp_path)
    assert (again.of("f0"), again.of("f1"), again.of("f2")) == (0, 4, 3)
    (tmp_path / EPOCHS).write_bytes(b"{")
    with pytest.raises(StartupError, match=r"link\.json cannot be read .*remove it"):
        FleetEpochs(tmp_path)


@on_link(keys=KEYS)
async def test_link_needs_a_key_with_its_scope(server: LiveServer) -> None:
    for key, code in (("", "unauthenticated"), ("x", "unauthenticated"), ("data", "forbidden")):
        error = await refusal(server.link_address, FIRST, key=key)
        assert error.code == code
    async with attached(server, key="linked"):
        async with httpx.AsyncClient(base_url=server.url) as client:
            reply = await client.post(
                "/engine/pause", json={}, headers={"authorization": "Bearer linked"}
            )
            assert reply.status_code == 403, "the scope opens no route that commands"


@on_link(keys=KEYS)
async def test_link_ends_once_its_key_is_removed(server: LiveServer) -> None:
    assert server.config.api_key_file is not None
    async with attached(server, key="linked") as gateway:
        server.config.api_key_file.write_text(KEYS.partition("\n")[0])
        await happens(lambda: gateway.deaths)
        assert "no known API key" in gateway.deaths[0][0].error.message


def test_link_is_encrypted_with_the_servers_certificate(model: Path, tmp_path: Path) -> None:
    issuer = Issuer(tmp_path / "ca")
    cert, key = issuer.issue("server")

    async def story(server: LiveServer) -> None:
        async with attached(server, tls=Tls(ca=issuer.ca)) as gateway:
            gateway.submit(request("a", [65], 3))
            await happens(lambda: gateway.ended("a"))
        async with attached(server, ready=False) as plain:
            await happens(lambda: plain.deaths)
            assert plain.deaths[0][0].ending == "not_launched"

    with live_server(model, link_port=0, tls_cert=cert, tls_key=key) as server:
        server.run(story(server), within_s=120)


@pytest.mark.parametrize(
    ("messages", "code", "reason"),
    [
        ([b""], "invalid_request", "not a command of a link"),
        ([b"\xc1" * 100], "invalid_request", "not a command of a link"),
        ([b"\x81" * 2000], "invalid_request", "not a command of a link"),
        ([Ping()], "invalid_request", "the first command is Ping"),
        ([Submit([])], "invalid_request", "the first command is Submit"),
        ([FIRST, FIRST], "invalid_request", "a stream attaches once"),
        ([FIRST, Attach(fleet="g", epoch=2)], "invalid_request", "a stream attaches once"),
        ([FIRST, Stop()], "invalid_request", "not a command of a link"),
        ([FIRST, Ping(), b"\xff\xfe"], "invalid_request", "not a command of a link"),
        ([FIRST, bytes(4 * 2**20 + 1)], "too_large", "the limit is 4194304"),
        ([FIRST, bytes(8 * 2**20 + 1)], TltError.code, ""),
    ],
)
def test_message_that_is_no_command_ends_the_stream_typed(
    model: Path, messages: list[Any], code: str, reason: str
) -> None:
    async def story(server: LiveServer) -> None:
        error = await refusal(server.link_address, *messages)
        assert error.code == code and reason in error.message
        async with attached(server) as gateway:  # and harms no other
            assert gateway.of(Ready)

    with live_server(model, link_port=0, max_body_mb=1) as server:
        server.run(story(server))


def test_largest_body_limit_is_no_obstacle_to_grpc(model: Path) -> None:
    async def story(server: LiveServer) -> None:
        async with attached(server) as gateway:
            assert gateway.of(Ready)

    limits = {"max_body_mb": 2**16, "max_bodies_mb": 2**17}
    with live_server(model, link_port=0, grpc_port=0, **limits) as server:
        server.run(story(server))


@on_link(max_body_mb=1)
async def test_largest_legal_batch_fits_the_messages(server: LiveServer) -> None:
    text = "x" * 2**20
    async with attached(server) as gateway:
        batch = [request(f"{at}", [65] * 500, 3) for at in range(256)]
        sampling = msgspec.structs.replace(batch[0].sampling, stop=(text,))
        batch += [request(f"large{at}", [65], 3, sampling=sampling) for at in range(6)]
        gateway.submit(*batch)
        await happens(lambda: gateway.ended(*(each.id for each in batch)))
        assert not gateway.deaths
        assert {outputs[-1].finish_reason for outputs in gateway.outputs.values()} == {"length"}


def test_silent_and_slow_gateways_are_cut_off(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_link, "ATTACH_S", 0.2)
    monkeypatch.setattr(rpc_link, "SILENT_S", 0.4)

    async def story(server: LiveServer) -> None:
        for messages in ([], [FIRST], [FIRST, Ping()]):
            error = await refusal(server.link_address, *messages)
            assert error.code == "request_timeout" and "no command came for 0." in error.message
        await happens(lambda: server.client.relay is None)

    with live_server(model, link_port=0) as server:
        server.run(story(server))


def test_gateway_that_reads_nothing_is_cut_off(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_link, "SILENT_S", 0.5)

    async def story(server: LiveServer) -> None:
        options = [("grpc.http2.lookahead_bytes", 2**16), ("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(server.link_address, options) as channel:
            call = channel.stream_stream("/tlt.Link/Stream")()
            await call.write(encode(FIRST))
            await happens(lambda: server.client.relay is not None)
            while server.client.relay is not None:
                server.client.take(Phase("load", 0.1, "x" * 10**6))
                await call.write(encode(Ping()))
                await asyncio.sleep(0.02)

    with live_server(model, link_port=0) as server:
        server.run(story(server))


async def closes(connection: socket.socket) -> None:
    """Wait until the server has closed a connection."""
    with suppress(OSError):
        while await asyncio.get_running_loop().sock_recv(connection, 2**12):
            pass


def silent(server: LiveServer, count: int) -> list[asyncio.Task[None]]:
    """Open connections that send nothing; each task ends once the server has closed its one."""
    host, _, port = server.link_address.rpartition(":")
    tasks = []
    for _ in range(count):
        connection = socket.create_connection((host, int(port)), 60)
        connection.setblocking(False)
        tasks.append(task := asyncio.create_task(closes(connection)))
        task.add_done_callback(lambda _, connection=connection: connection.close())  # type: ignore[misc]
    return tasks


@on_link(header_timeout_s=300.0)
async def test_connections_beyond_the_limit_are_closed_at_once(server: LiveServer) -> None:
    tasks: list[asyncio.Task[None]] = []

    def few_are_open() -> bool:
        return sum(not task.done() for task in tasks) < LINK_CONNECTIONS

    async with attached(server) as gateway:
        for _ in range(20):
            tasks += silent(server, 2 * LINK_CONNECTIONS)
            await happens(few_are_open)
        gateway.submit(request("a", [65], 3))
        await happens(lambda: gateway.ended("a"))
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.get("/livez")).status_code == 200
        for task in tasks:
            task.cancel()


@on_link(header_timeout_s=1.0)
async def test_silent_connections_keep_no_gateway_out_for_long(server: LiveServer) -> None:
    async with attached(server) as before:
        tasks = silent(server, 2 * LINK_CONNECTIONS)
        async with attached(server, epoch=2):  # once the silent ones have met header_timeout_s
            await happens(lambda: before.deaths)
        await asyncio.wait(tasks)


def test_client_without_a_key_keeps_no_connection(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_link, "AGE_MS", 300)
    monkeypatch.setattr(rpc_link, "log", log := structlog.testing.CapturingLogger())

    @on_link(keys=KEYS)
    async def story(server: LiveServer) -> None:
        async with (
            attached(server, key="linked") as gateway,
            grpc.aio.insecure_channel(server.link_address) as channel,
            asyncio.timeout(60),
        ):
            while len({call.kwargs.get("peer") for call in log.calls}) < 4:
                with suppress(grpc.RpcError):
                    async for _ in channel.stream_stream(METHOD)():
                        pass
            assert not gateway.deaths, "a stream outlives the age of its connection"

    story(model=model)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (HandOver("h", "/tmp/elsewhere", "/tmp"), "written to a directory"),
        (Submit([request("a", [65]), request("a", [66])]), "two open sequences have the id 'a'"),
    ],
)
def test_command_that_no_gateway_may_send_ends_the_stream(
    model: Path, command: Command, reason: str
) -> None:
    async def story(server: LiveServer) -> None:
        async with attached(server) as gateway:
            gateway.link.send(command)
            await happens(lambda: gateway.deaths)
            assert reason in gateway.deaths[0][0].error.message
            await gateway.ready(times=2)
            assert not server.engine.submitted and not server.engine.weight_commands

    with live_server(model, link_port=0) as server:
        server.run(story(server))


@on_link()
async def test_stopping_server_hands_its_sequences_back_at_once(server: LiveServer) -> None:
    async with attached(server) as gateway:
        gateway.submit(request("a", [65, HANGS]))
        await happens(lambda: server.engine.running)
        assert await server.client.drain(30), "it does not wait for a gateway's sequences"
        await happens(lambda: gateway.deaths)
        assert "draining" in gateway.deaths[0][0].error.message
        assert not gateway.outputs, "no output says that they failed"
