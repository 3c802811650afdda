"""The gRPC server beyond its methods: reflection, health, events, the end of streams and the room
that they take, metrics.
"""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from tests.frontend.live_server import LiveServer, live_server
from tests.frontend.test_metrics import series
from tests.frontend.test_rpc import LONG, SHORT, channel, refused, server, stub
from tests.waiting import in_loop, until
from tlt_client.errors import ConnectionFailed, NotReached
from tlt_client.rpc import (
    GenerateRequest,
    GetInfoRequest,
    RolloutServiceStub,
    WatchEventsRequest,
    error_of,
)
from tlt_client.rpc import rollout_pb2 as proto
from tlt_server import build
from tlt_server.frontend.rpc.health import SideStreams

__all__ = ["channel", "server", "stub"]  # fixtures


def test_reflection_describes_the_service(channel: grpc.Channel) -> None:
    database = ProtoReflectionDescriptorDatabase(channel)
    assert {"tlt.v1.RolloutService", "grpc.health.v1.Health"} <= set(database.get_services())
    assert "GenerateRequest" in [
        message.name
        for message in database.FindFileContainingSymbol("tlt.v1.RolloutService").message_type
    ]


def test_a_foreign_web_page_is_refused_as_over_http(stub: RolloutServiceStub) -> None:
    error = refused(
        lambda: stub.GetInfo(GetInfoRequest(), metadata=[("origin", "https://evil.example")])
    )
    assert error.code == "forbidden" and "evil.example" in error.message


def test_health_and_events_follow_the_server(
    server: LiveServer, stub: RolloutServiceStub, channel: grpc.Channel
) -> None:
    statuses, states = [], []
    health = HealthStub(channel).Watch(
        health_pb2.HealthCheckRequest(service="tlt.v1.RolloutService")
    )
    events = stub.WatchEvents(WatchEventsRequest())

    def follow(stream: Any, into: list[Any], what: Callable[[Any], Any]) -> None:
        try:
            for message in stream:
                into.append(what(message))
        except grpc.RpcError:
            pass

    threads = [
        threading.Thread(
            target=follow, args=(health, statuses, lambda message: message.status), daemon=True
        ),
        threading.Thread(
            target=follow, args=(events, states, lambda message: message.state), daemon=True
        ),
    ]
    for thread in threads:
        thread.start()
    until(lambda: statuses and states)
    assert states[0].ready and states[0].weight_version == server.client.info.weight_version  # type: ignore[union-attr]
    stub.Pause(proto.PauseRequest(in_flight="drain", new_requests="refuse"))
    until(lambda: len(statuses) == 2 and len(states) == 2)
    assert states[1].paused and not states[1].ready and "POST /engine/resume" in states[1].reason
    stub.Resume(proto.ResumeRequest())
    until(lambda: len(statuses) == 3 and len(states) == 3)
    assert statuses == [
        health_pb2.HealthCheckResponse.SERVING,
        health_pb2.HealthCheckResponse.NOT_SERVING,
        health_pb2.HealthCheckResponse.SERVING,
    ]
    with pytest.raises(grpc.RpcError, match="there is no service 'x'"):
        HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="x"))
    assert (
        next(HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="x"))).status
        == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    )
    assert httpx.get(f"{server.url}/events").text.startswith('event: state\ndata: {"ready":true')
    health.cancel()
    events.cancel()


def test_streams_of_one_client_block_no_other_call(model: Path) -> None:
    watch = health_pb2.HealthCheckRequest()
    with (
        live_server(model, grpc_port=0, max_connections=4) as bounded,
        grpc.insecure_channel(bounded.grpc_address) as own,
        grpc.insecure_channel(bounded.grpc_address, [("grpc.use_local_subchannel_pool", 1)]) as far,
    ):
        health = HealthStub(own).Watch(watch)
        assert next(health).status == health_pb2.HealthCheckResponse.SERVING
        theirs = []
        for _ in range(8):
            theirs.append(HealthStub(far).Watch(watch))
            assert next(theirs[-1]).status == health_pb2.HealthCheckResponse.SERVING
        for stream in theirs[:5]:
            with pytest.raises(grpc.RpcError, match="this connection had most of them: close some"):
                next(stream)
        reflected = ProtoReflectionDescriptorDatabase(own)
        assert "tlt.v1.RolloutService" in reflected.get_services()
        assert RolloutServiceStub(own).GenerateBatch(SHORT, timeout=20).results
        RolloutServiceStub(own).Pause(proto.PauseRequest(new_requests="refuse"))
        assert next(health).status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_stopping_server_ends_every_stream_with_a_typed_error(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "FLUSH_S", 50)
    with (
        live_server(model, grpc_port=0) as stopping,
        grpc.insecure_channel(stopping.grpc_address) as channel,
    ):
        stub = RolloutServiceStub(channel)
        stream, events = stub.Generate(LONG), stub.WatchEvents(WatchEventsRequest())
        health = HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(events).state.ready
        assert next(health).status == health_pb2.HealthCheckResponse.SERVING
        until(lambda: stopping.engine.running)
        started = time.monotonic()
        stopper = threading.Thread(target=stopping.stop)
        stopper.start()
        last = list(stream)
        assert [event.WhichOneof("event") for event in last] == ["error", "done"]
        assert last[0].error.error.code == "unavailable"
        assert "shutting down" in last[0].error.error.message
        assert [event.state.draining for event in events] == [True]
        for _ in health:
            pass
        stopper.join(30)
        assert time.monotonic() - started < 25, "open streams did not hold it up"
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetInfo(GetInfoRequest())
        assert isinstance(error_of(caught.value), NotReached | ConnectionFailed)
        stopping.stop = lambda: None  # type: ignore[method-assign]


def test_calls_are_counted_and_logged(server: LiveServer, stub: RolloutServiceStub) -> None:
    def counted(method: str, code: str) -> float:
        return (
            series(httpx.get(f"{server.url}/metrics").text)
            .get("tlt_grpc_calls_total", {})
            .get((code, method), 0.0)
        )

    before = counted("GenerateBatch", "OK"), counted("GenerateBatch", "INVALID_ARGUMENT")
    stub.GenerateBatch(SHORT)
    refused(lambda: stub.GenerateBatch(GenerateRequest()))
    until(lambda: counted("GenerateBatch", "INVALID_ARGUMENT") == before[1] + 1)
    assert counted("GenerateBatch", "OK") == before[0] + 1


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
async def test_stuck_stream_is_ended_with_a_status_to_make_room() -> None:
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
async def test_ended_or_failed_stream_frees_its_slot() -> None:
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
