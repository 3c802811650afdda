"""The record of a request: an id in its reply and its log lines, an access line, metrics, a trace.

A request that changes state also gets the line `audit`, unless it was refused; a request whose
client left may have changed state. No line, label or span contains a client's text from the body,
the query or the headers, except a well-formed X-Request-Id and the version of pushed weights.

A trace is a span for all of a request, and child spans for its parts, each recorded once it has
ended. `Access` starts the trace, `CURRENT` carries it to everything that the request starts. A
thread of the OpenTelemetry SDK, an optional extra, sends spans to a collector by OTLP over HTTP.
Its queue holds 2,048 spans and drops further ones; an absent collector delays no request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tlt_server import __version__
from tlt_server.errors import StartupError
from tlt_server.frontend.http.auth import is_change
from tlt_server.metrics import Metrics

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

HEADER, SESSION_HEADER = b"x-request-id", b"x-session-id"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})
# Probes and scrapes ask for these every few seconds. An open page polls the others by GET, and a
# server that takes weights asks for hundreds of slices.
QUIET = frozenset({"/health", "/livez", "/readyz", "/startupz", "/metrics"})
POLLED = frozenset({"/server_info", "/strategy", "/weights/files/{role}/{name}"})
_WELL_FORMED = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")

log = structlog.get_logger()


Value = str | int | float
Headers = Iterable[tuple[bytes, bytes]]
PARENT = (b"traceparent", b"tracestate")
FLUSH_S = 3.0  # at the end, for spans that were not sent yet
SEND_S = 3.0  # one batch, with its retries


class RequestTrace(Protocol):
    def part(self, name: str, start_s: float, end_s: float, **attributes: Value) -> None:
        """Record a part that lasted from `start_s` to `end_s`, by the monotonic clock."""

    def end(self, *, failed: bool, **attributes: Value) -> None:
        """End the span of the request."""


class Untraced:
    def part(self, name: str, start_s: float, end_s: float, **attributes: Value) -> None: ...

    def end(self, *, failed: bool, **attributes: Value) -> None: ...


Begin = Callable[[Headers], RequestTrace]  # a trace from a request's headers
UNTRACED = Untraced()
CURRENT: ContextVar[RequestTrace] = ContextVar("trace", default=UNTRACED)
SESSION: ContextVar[str] = ContextVar("session", default="")  # a well-formed X-Session-ID


def untraced(headers: Headers) -> RequestTrace:
    return UNTRACED


@asynccontextmanager
async def tracing(endpoint: str) -> AsyncIterator[Begin]:
    """Yield the function that starts the trace of a request. Without an endpoint nothing is traced.
    At the end, send the remaining spans.
    """
    if not endpoint:
        yield untraced
        return
    traces = OtlpTraces(endpoint)
    try:
        yield traces.begin
    finally:
        await asyncio.to_thread(traces.close)


class OtlpTraces:
    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise StartupError(
                f"otlp_endpoint is {endpoint}, and the OpenTelemetry SDK is not installed; run "
                "pip install 'tlt-server[otlp]', or leave otlp_endpoint out"
            ) from None

        named = {
            SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "tlt-server"),
            SERVICE_VERSION: __version__,
        }
        self._exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=SEND_S)
        # The SDK warns at every retry, many times a minute while a collector is away.
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("tlt_server", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, headers: Headers) -> RequestTrace:
        """Begin the span of a request, under the caller's span if the headers name one."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        carrier = {
            name.decode(): value.decode("latin-1") for name, value in headers if name in PARENT
        }
        caller = self._propagator.extract(carrier, Context())
        return _Traced(
            self._tracer, self._tracer.start_span("request", caller, kind=SpanKind.SERVER)
        )

    def close(self) -> None:
        """Send the queued spans, for `FLUSH_S` at most; the SDK itself has no such limit."""
        give_up = threading.Timer(FLUSH_S, self._exporter.shutdown)
        give_up.start()
        self._provider.shutdown()
        give_up.cancel()


class _Traced:
    def __init__(self, tracer: Tracer, span: Span) -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracer, self._span = tracer, span
        self._here = set_span_in_context(span)
        # One difference of the clocks for all parts, so that none begins before another has ended.
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def part(self, name: str, start_s: float, end_s: float, **attributes: Value) -> None:
        part = self._tracer.start_span(
            name, self._here, attributes=_named(attributes), start_time=self._unix_ns(start_s)
        )
        part.end(self._unix_ns(end_s))

    def end(self, *, failed: bool, **attributes: Value) -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_attributes(_named(attributes))
        if failed:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()

    def _unix_ns(self, monotonic_s: float) -> int:
        return self._epoch_ns + round(monotonic_s * 1e9)


def _named(attributes: dict[str, Value]) -> dict[str, Value]:
    """Return attributes by their names in traces, which have dots."""
    return {name.replace("__", "."): value for name, value in attributes.items()}


def given_id(headers: Headers, header: bytes = HEADER) -> str:
    """Return the client's id in this header; empty without a well-formed one."""
    given = next((value for name, value in headers if name == header), b"")
    return given.decode() if _WELL_FORMED.fullmatch(given) else ""


class Access:
    """A wrapper of the whole application, so that it also records refusals and failures."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        template: Callable[[str], str],
        begin: Begin = untraced,
    ) -> None:
        """`template(path)`: returns the route of a path, from a bounded set. `begin`: starts the
        trace of a request.
        """
        self._app, self._metrics, self._template, self._begin = app, metrics, template, begin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["raw_path"].endswith(b"/") and len(scope["path"]) > 1:  # some clients append one
            scope = {**scope, "path": scope["path"][:-1]}
        request = _Request(scope, receive, send)
        started = time.perf_counter()
        trace = UNTRACED if scope["path"] in QUIET else self._begin(scope["headers"])
        outer, session = CURRENT.set(trace), SESSION.set(given_id(scope["headers"], SESSION_HEADER))
        with structlog.contextvars.bound_contextvars(request_id=request.id):
            try:
                await self._app(scope, request.receive, request.send)
            except Exception:
                if not request.status:
                    raise
                # Otherwise the error was answered and logged by `replies.unexpected`. Uvicorn would
                # log its message, which may quote a prompt.
            finally:
                CURRENT.reset(outer)
                SESSION.reset(session)
                trace.end(
                    failed=not 0 < request.status < 500,
                    http__request__method=scope["method"]
                    if scope["method"] in METHODS
                    else "other",
                    http__route=self._template(scope["path"]),
                    http__response__status_code=request.status,
                    tlt__request_id=request.id,
                )
                self._keep(scope, request, time.perf_counter() - started)

    def _keep(self, scope: Scope, request: _Request, seconds: float) -> None:
        status, route = request.status, self._template(scope["path"])
        method = scope["method"] if scope["method"] in METHODS else "other"
        self._metrics.exchanges.http.labels(method, route, str(status)).inc()
        self._metrics.exchanges.http_s.labels(route).observe(seconds)
        quiet = route in QUIET or (method == "GET" and route in POLLED)
        probe_says_no = route in QUIET and status == 503
        answered = 0 < status < 400 or probe_says_no
        write = (
            log.debug
            if quiet and answered
            else log.info
            if answered or status == 499
            else log.warning
        )
        client = scope["client"][0] if scope.get("client") else ""
        write(
            "request",
            method=method,
            route=route,
            status=status,
            seconds=round(seconds, 6),
            request_bytes=request.received,
            response_bytes=request.sent,
            client=client,
        )
        if (status < 400 or status == 499) and is_change(scope):
            log.info("audit", method=method, route=route, status=status, client=client)


class _Request:
    """A request in progress, with its id and the bytes received and sent."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.id = given_id(scope["headers"]) or secrets.token_hex(8)
        self.received = self.sent = 0  # body bytes
        self.status = 0  # HTTP status; 0 without a reply
        self._receive, self._send = receive, send

    async def receive(self) -> Message:
        message = await self._receive()
        self.received += len(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (HEADER, self.id.encode())]
        else:
            self.sent += len(message.get("body", b""))
        await self._send(message)
