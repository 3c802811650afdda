"""The gRPC server's own part: clients that leave or do not read, sizes, keys before messages,
health, reflection.
"""

import asyncio
import gzip
import threading
from collections.abc import Awaitable, Callable, Iterator
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

from tests.frontend.fake_engine import HANGS
from tests.frontend.live_server import LiveServer, live_server, serving
from tests.frontend.test_metrics import series
from tests.waiting import in_loop, until
from tlt_client.errors import Cancelled, InvalidRequest, ServerError, Unauthenticated, Unavailable
from tlt_client.rpc import (
    GenerateRequest,
    GetInfoRequest,
    Item,
    RolloutServiceStub,
    SamplingFields,
    error_of,
)
from tlt_client.rpc import rollout_pb2 as proto
from tlt_server.errors import InvalidRequest as InvalidValue
from tlt_server.frontend.rpc.exchange import Exchange, MessageReads
from tlt_server.frontend.rpc.methods import METHODS
from tlt_server.frontend.rpc.server import refuse

LONG = GenerateRequest(requests=[Item(token_ids=[HANGS])])
SHORT = GenerateRequest(
    requests=[Item(prompt="abc", seed=7)], sampling=SamplingFields(max_tokens=4)
)


server = serving(
    grpc_port=0,
    max_body_mb=1,
    body_timeout_s=2.0,
    send_timeout_s=2.0,
    max_header_kb=4,
    max_connections=5,
    max_output_tokens=500,
)


@pytest.fixture
def channel(server: LiveServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc_address) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel) -> RolloutServiceStub:
    return RolloutServiceStub(channel)


def refused(call: Callable[[], Any]) -> ServerError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error = error_of(caught.value)
    assert isinstance(error, ServerError), error
    return error


def raw(channel: grpc.Channel, method: str = "GenerateBatch", **options: Any) -> Any:
    """The call with bytes for messages."""
    return channel.unary_unary(f"/tlt.v1.RolloutService/{method}", **options)


def test_a_cancelled_call_frees_its_sequences(server: LiveServer, stub: RolloutServiceStub) -> None:
    stream = stub.Generate(LONG)
    until(lambda: server.engine.running)
    stream.cancel()
    until(lambda: not server.engine.running and len(server.client) == 0)
    pending = stub.GenerateBatch.future(LONG)
    until(lambda: server.engine.running)
    pending.cancel()
    until(lambda: not server.engine.running and len(server.client) == 0)


def test_a_passed_deadline_of_grpc_frees_its_sequences(
    server: LiveServer, stub: RolloutServiceStub
) -> None:
    assert refused(lambda: stub.GenerateBatch(LONG, timeout=0.2)).code == "unknown"
    until(lambda: not server.engine.running and len(server.client) == 0)


def test_a_broken_connection_frees_its_sequences(server: LiveServer) -> None:
    with grpc.insecure_channel(server.grpc_address) as channel:
        stream = RolloutServiceStub(channel).Generate(LONG)
        until(lambda: server.engine.running)
    assert stream.done()
    until(lambda: not server.engine.running and len(server.client) == 0)


def test_grpc_call_that_stops_reading_is_cut_off(model: Path) -> None:
    """A window that does not grow, and a reply of many times its size: sequences that still run end
    with the stream.
    """
    narrow = [("grpc.http2.bdp_probe", 0)]
    with (
        live_server(
            model, grpc_port=0, send_timeout_s=0.3, engine={"per_step": 100, "step_s": 0.0}
        ) as fast,
        grpc.insecure_channel(fast.grpc_address, options=narrow) as channel,
    ):
        items = [*(Item(prompt="abc", n=64) for _ in range(5)), Item(token_ids=[HANGS])]
        stream = RolloutServiceStub(channel).Generate(
            GenerateRequest(requests=items, sampling=SamplingFields(max_tokens=400))
        )
        next(stream)
        until(lambda: len(fast.client) == 0)
        error = refused(lambda: list(stream))
        assert isinstance(error, Cancelled) and "unread for 0.3 s (send_timeout_s)" in error.message


def test_large_messages_are_refused_with_a_typed_error(
    server: LiveServer, channel: grpc.Channel
) -> None:
    limit = 2**20
    for size in (limit + 1, 2 * limit - 100):
        error = refused(lambda: raw(channel)(bytes(size)))  # noqa: B023
        assert error.code == "too_large"
        assert f"limit is {limit} bytes (max_body_mb)" in error.message
    beyond = refused(lambda: raw(channel)(bytes(3 * limit)))
    assert beyond.code == "unknown" and "RESOURCE_EXHAUSTED" in beyond.message
    assert isinstance(refused(lambda: raw(channel)(b"\xff" * 100)), InvalidRequest)


def test_compressed_grpc_message_is_refused_unpacked(
    server: LiveServer, channel: grpc.Channel
) -> None:
    error = refused(lambda: raw(channel)(bytes(50 * 2**20), compression=grpc.Compression.Gzip))
    assert error.code == "unknown" and len(gzip.compress(bytes(50 * 2**20))) < 2**20
    assert "UNIMPLEMENTED" in error.message or "RESOURCE_EXHAUSTED" in error.message


def test_grpc_metadata_are_bounded(stub: RolloutServiceStub) -> None:
    error = refused(lambda: stub.GenerateBatch(SHORT, metadata=[("x-request-id", "x" * 8000)]))
    assert error.code == "unknown" and "metadata" in error.message
    assert stub.GenerateBatch(SHORT, metadata=[("x-request-id", "x" * 100)]).results


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (SHORT.SerializeToString() + b"\xf8\x06\x01", "field number 111"),
        (
            GenerateRequest(
                requests=[Item(prompt="a")], timeout_s=float("nan")
            ).SerializeToString(),
            "timeout_s is nan; it must be a finite",
        ),
        (
            GenerateRequest(
                requests=[Item(prompt="a", sampling=SamplingFields(logit_bias={5: float("inf")}))]
            ).SerializeToString(),
            "requests[0].sampling.logit_bias[5] is inf",
        ),
        (b"\x0a", "is no tlt.v1.GenerateRequest; send what rollout.proto defines"),
    ],
)
def test_messages_without_a_json_form_are_refused(
    message: bytes, says: str, channel: grpc.Channel
) -> None:
    error = refused(lambda: raw(channel)(message))
    assert isinstance(error, InvalidRequest) and says in error.message


def test_name_in_a_grpc_message_is_one_path_segment(
    server: LiveServer, stub: RolloutServiceStub
) -> None:
    for name in ("../strategy", "a/../../strategy", "x/commit", "%2e%2e/strategy"):
        error = refused(lambda: stub.GetRollout(proto.GetRolloutRequest(id=name)))  # noqa: B023
        assert error.code == "invalid_request" and error.message.startswith(
            f"id is {name!r}; it must have no '/'"
        ), error.message
    error = refused(lambda: stub.GetRollout(proto.GetRolloutRequest()))
    assert error.code == "invalid_request" and error.message.startswith("id is empty")
    for name in ("..%2Fstrategy", "?a=b", "#", " ", "\x00", "\u00fc"):
        error = refused(lambda: stub.GetRollout(proto.GetRolloutRequest(id=name)))  # noqa: B023
        assert error.code == "not_found" and error.message.startswith("there is no rollout"), (
            name,
            error.message,
        )


def test_grpc_call_without_a_message_times_out(server: LiveServer, channel: grpc.Channel) -> None:
    call = channel.stream_unary("/tlt.v1.RolloutService/GenerateBatch")
    silent = threading.Event()

    def nothing() -> Iterator[bytes]:
        silent.wait(30)
        yield from ()

    error = refused(lambda: call(nothing()))
    silent.set()
    assert error.code == "request_timeout" and "2 s (body_timeout_s)" in error.message


def test_grpc_calls_beyond_max_connections_are_refused(
    server: LiveServer, stub: RolloutServiceStub
) -> None:
    open_calls = [stub.Generate(LONG) for _ in range(5)]
    until(lambda: len(server.engine.running) == 5)
    error = refused(lambda: stub.GetInfo(GetInfoRequest()))
    assert isinstance(error, Unavailable) and "(max_connections)" in error.message
    assert error.retry_after_s == 1
    for call in open_calls:
        call.cancel()
    until(lambda: not server.engine.running)
    until(lambda: stub.GetInfo(GetInfoRequest()).ready)


class SlowToBegin:
    """A context whose reply starts later than a client may take to read."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5"

    async def read(self) -> bytes:
        return b""

    async def send_initial_metadata(self, metadata: object) -> None:
        await asyncio.sleep(0.2)
        self.sent.append("metadata")

    async def write(self, data: bytes) -> None:
        self.sent.append(data)


def test_deadline_does_not_cut_off_the_start_of_a_reply() -> None:
    """No status could follow half a start, and the client would wait for ever."""
    context, method = SlowToBegin(), METHODS["/tlt.v1.RolloutService/GetInfo"]

    async def app(
        scope: object, receive: object, send: Callable[[dict[str, object]], Awaitable[None]]
    ) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def called() -> Exchange:
        exchange = Exchange(context, method, MessageReads(1), 0.05, secure=False)  # type: ignore[arg-type]
        await exchange.run(app)  # type: ignore[arg-type]
        await exchange.answer()
        return exchange

    assert asyncio.run(called()).error is None and context.sent == ["metadata", b""]


class Left(SlowToBegin):
    """The call of a client that has left, which gRPC has not cancelled yet."""

    async def write(self, data: bytes) -> None:
        await super().write(data)
        raise grpc.aio.InternalError("a send failed")


@in_loop
async def test_client_leaving_during_a_write_is_not_a_server_error() -> None:
    context, method = Left(), METHODS["/tlt.v1.RolloutService/WatchEvents"]

    async def app(
        scope: object, receive: object, send: Callable[[dict[str, object]], Awaitable[None]]
    ) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(2):
            await send({"type": "http.response.body", "body": b"event: state\ndata: {}"})

    exchange = Exchange(context, method, MessageReads(1), 5.0, secure=False)  # type: ignore[arg-type]
    await exchange.run(app)  # type: ignore[arg-type]
    assert exchange.error is None
    assert len(context.sent) == 2, "nothing is written after a send that failed"


def test_key_is_checked_before_the_grpc_message_is_read(model: Path) -> None:
    with (
        live_server(model, keys="secret\n", grpc_port=0, max_body_mb=1) as keyed,
        grpc.insecure_channel(keyed.grpc_address) as channel,
    ):
        stub, key = RolloutServiceStub(channel), [("authorization", "Bearer secret")]
        for message in (b"", b"\xff" * 100, bytes(2**20 + 5)):
            assert isinstance(refused(lambda: raw(channel)(message)), Unauthenticated)  # noqa: B023
        assert stub.GenerateBatch(SHORT, metadata=key).results
        database = ProtoReflectionDescriptorDatabase(channel)
        with pytest.raises(grpc.RpcError) as caught:
            database.get_services()
        assert isinstance(error_of(caught.value), Unauthenticated)
        assert (
            HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status
            == health_pb2.HealthCheckResponse.SERVING
        )
        refusals = httpx.get(f"{keyed.url}/metrics", headers=dict(key)).text
        assert series(refusals)["tlt_auth_refusals_total"]["no_key",] == 4


def test_long_error_details_keep_their_remedy() -> None:
    class Refused:
        async def abort(self, code: Any, details: str, metadata: Any) -> None:
            self.details, self.metadata = details, dict(metadata)

    for word in ("x", "é", "\ud800"):
        context, message = Refused(), f"the value is {word * 5000}; the limit is 5: send less"
        asyncio.run(refuse(context, InvalidValue(message), []))
        assert len(context.details.encode()) <= 1024
        assert context.details.startswith("the value is ")
        assert context.details.endswith("; the limit is 5: send less")
        assert len(context.metadata["grpc-status-details-bin"]) < 2300
