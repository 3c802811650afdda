"""The gRPC server, in the loop of the HTTP server: the service, health, reflection, TLS, and bounds
on input that no application sees.

On the wire a unary call is a stream of one message, so all methods are served as streams and there
is only one path through this code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Literal

import grpc
import structlog
from google.protobuf import any_pb2
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection
from starlette.types import ASGIApp

from tlt_client.rpc.rollout_pb2 import Error
from tlt_server.config import Config
from tlt_server.errors import StartupError, TltError
from tlt_server.frontend.http.auth import Gate, bearer
from tlt_server.frontend.http.connections import max_grpc_connections
from tlt_server.frontend.http.keys import Certificates, Watched
from tlt_server.frontend.link.answers import Changes
from tlt_server.frontend.rpc.exchange import Context, Exchange, MessageReads
from tlt_server.frontend.rpc.health import Health, SideStreams
from tlt_server.frontend.rpc.methods import METHODS, SERVICE, RpcMethod
from tlt_server.metrics import Metrics

KEEPALIVE_S = 60  # a connection that is silent this long gets a ping
KEEPALIVE_TIMEOUT_S = 20  # a connection that does not answer the ping is closed after this time
MIN_PING_S = 10  # time between two pings of a client; a client that sends them faster is cut off
IDLE_S = 300  # a connection without a call for this long is told to go
# Later calls open a new connection, by which a change of certificates or addresses is seen.
AGE_S = 3600
LOOKAHEAD_BYTES = 2**16
BEYOND = 2  # gRPC's limits are this many times ours, so that refusals up to there are typed
MAX_INT = 2**31 - 1  # the largest value of an option
SERVICES = (
    SERVICE.full_name,
    health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
    reflection.SERVICE_NAME,
)


class RpcServer:
    """The gRPC server in front of the application."""

    def __init__(
        self,
        app: ASGIApp,
        config: Config,
        gate: Gate,
        metrics: Metrics,
        is_ready: Callable[[], bool],
        told: Changes,
        certificates: Watched[Certificates] | None = None,
    ) -> None:
        self._config, self._certificates = config, certificates
        streams = SideStreams(config.max_connections)
        self._health = Health(is_ready, told, streams)
        self._server = grpc.aio.server(
            interceptors=[_Reflection(gate, streams)],
            options=options_of(config),
            maximum_concurrent_rpcs=(BEYOND + 2) * config.max_connections,
        )
        self._server.add_generic_rpc_handlers(
            [_Calls(app, config, metrics, secure=certificates is not None)]
        )
        add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(SERVICES, self._server)

    async def start(self) -> str:
        """Listen, and return the address with its port; for port 0, a free one.

        `StartupError` if the address cannot be bound.
        """
        return await listen(self._server, self._config, "grpc_port", self._certificates)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, and give the open ones `grace_s` to end."""
        self._health.stop()
        await self._server.stop(grace_s)


async def listen(
    server: grpc.aio.Server,
    config: Config,
    setting: Literal["grpc_port", "link_port"],
    certificates: Watched[Certificates] | None,
) -> str:
    """Start a server on the port of a setting, and return its address. `StartupError` if it cannot
    be bound.
    """
    host = f"[{config.host}]" if ":" in config.host else config.host
    address = f"{host}:{getattr(config, setting)}"
    try:
        if certificates is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, _credentials(certificates))
    except RuntimeError:
        raise StartupError(
            f"cannot bind {address} for gRPC; choose another --host or "
            f"--{setting.replace('_', '-')} (0 = a free one)"
        ) from None
    await server.start()
    return f"{host}:{port}"


class _Calls(grpc.GenericRpcHandler):
    """The methods of the service, with a count of calls."""

    def __init__(self, app: ASGIApp, config: Config, metrics: Metrics, *, secure: bool) -> None:
        self._app, self._config, self._metrics, self._secure = app, config, metrics, secure
        largest_mb = BEYOND * config.max_body_mb
        self._reads = MessageReads(max(1, config.max_bodies_mb // largest_mb))

    def service(
        self, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        method = METHODS.get(details.method)
        return (
            grpc.stream_stream_rpc_method_handler(partial(self._counted, method))
            if method is not None
            else None
        )

    async def _counted(self, method: RpcMethod, requests: Any, context: Context) -> None:
        code = "CANCELLED"
        try:
            # Every log line about this call has the method's name.
            with structlog.contextvars.bound_contextvars(grpc=method.name):
                error, metadata = await self._call(method, context)
            code = error.grpc_code if error is not None else "OK"
            if error is not None:
                await refuse(context, error, metadata)
        finally:
            self._metrics.exchanges.grpc_calls.labels(method.name, code).inc()

    async def _call(
        self, method: RpcMethod, context: Context
    ) -> tuple[TltError | None, list[tuple[str, str]]]:
        """Run the operations of the call's messages, in order, up to the last or to an error."""
        while True:
            exchange = Exchange(
                context, method, self._reads, self._config.send_timeout_s, secure=self._secure
            )
            with contextlib.closing(exchange):
                await exchange.run(self._app)
                if exchange.error is None and (
                    not method.client_streaming or exchange.path == method.operation.path
                ):
                    await exchange.answer()
                    return exchange.error, exchange.metadata  # the answer may have been left unread
            if exchange.error is not None:
                return exchange.error, exchange.metadata


class _Reflection(grpc.aio.ServerInterceptor):
    """Interceptor that serves reflection to callers with a key, as for `/openapi.json`."""

    def __init__(self, gate: Gate, streams: SideStreams) -> None:
        self._gate, self._streams = gate, streams

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(details)
        if not details.method.startswith(f"/{reflection.SERVICE_NAME}/"):
            return handler
        try:
            self._gate.admit(
                bearer(str(dict(details.invocation_metadata or ()).get("authorization", ""))), "any"
            )
        except TltError as error:
            return grpc.stream_stream_rpc_method_handler(partial(_refused, error))

        async def bounded(requests: Any, context: Context) -> None:
            await self._streams.send(context, handler.stream_stream(requests, context))

        return grpc.stream_stream_rpc_method_handler(
            bounded, handler.request_deserializer, handler.response_serializer
        )


async def _refused(error: TltError, requests: Any, context: Context) -> None:
    await refuse(context, error, [])


def _credentials(certificates: Watched[Certificates]) -> grpc.ServerCredentials:
    """Return credentials with which each new connection takes the newest certificate."""

    def newest() -> grpc.ServerCertificateConfiguration:
        pems = certificates()
        return grpc.ssl_server_certificate_configuration([(pems.key, pems.chain)], pems.client_ca)

    return grpc.dynamic_ssl_server_credentials(
        newest(), newest, require_client_authentication=certificates().client_ca is not None
    )


def options_of(config: Config) -> list[tuple[str, Any]]:
    """Return the options of a gRPC server, with its bounds."""
    return [
        ("grpc.so_reuseport", 0),  # otherwise two servers could share the port
        ("grpc.max_receive_message_length", min(BEYOND * config.max_body_mb * 2**20, MAX_INT)),
        ("grpc.max_send_message_length", -1),
        # The core takes this much of a message before it is asked for it; then it takes all. With
        # probes of the bandwidth it would take megabytes.
        ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_metadata_size", config.max_header_kb * 1024),
        ("grpc.absolute_max_metadata_size", config.max_header_kb * 1024),
        # No compression, since the size of an unpacked message has no bound.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.max_concurrent_streams", BEYOND * config.max_connections),
        ("grpc.server_handshake_timeout_ms", int(config.header_timeout_s * 1000)),
        ("grpc.max_allowed_incoming_connections", max_grpc_connections(config)),
        ("grpc.max_connection_idle_ms", int(IDLE_S * 1000)),
        ("grpc.max_connection_age_ms", int(AGE_S * 1000)),
        # No call lasts longer, so none is cut off.
        ("grpc.max_connection_age_grace_ms", int(config.max_timeout_s * 1000)),
        ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_S * 1000),
    ]


DETAILS = "grpc-status-details-bin"
RETRY_AFTER = "retry-after"
GAP = " ... "
MAX_MESSAGE_BYTES = 1024  # it is sent three times, and a client takes 8 kB of metadata


async def refuse(context: Context, error: TltError, metadata: list[tuple[str, str]]) -> None:
    """End the call with this error."""
    code, message = grpc.StatusCode[error.grpc_code], _cut(error.message)
    details = [_packed(Error(code=error.code, message=message, retryable=error.retryable))]
    retry_after = dict(metadata).get(RETRY_AFTER)
    if retry_after is not None:
        retry = RetryInfo()
        retry.retry_delay.seconds = int(retry_after)
        details.append(_packed(retry))
    status = Status(code=code.value[0], message=message, details=details)
    await context.abort(code, message, (*metadata, (DETAILS, status.SerializeToString())))


def _cut(message: str) -> str:
    """Cut the middle out of a message that is too long. The remedy is at its end."""
    data = message.encode(errors="replace")
    if len(data) <= MAX_MESSAGE_BYTES:
        return data.decode()
    half = (MAX_MESSAGE_BYTES - len(GAP)) // 2
    return data[:half].decode(errors="ignore") + GAP + data[-half:].decode(errors="ignore")


def _packed(message: Error | RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
