"""The trace of a request: a span for all of it, and child spans for its parts.

A part is recorded once it has ended. `Access` starts the trace, `CURRENT` carries it to everything
that the request starts. Spans contain numbers, routes and versions, never a prompt, a completion or
a key.

A thread of the OpenTelemetry SDK, an optional extra, sends them to a collector by OTLP over HTTP.
Its queue has 2,048 spans and drops further ones; an unreachable collector costs requests no time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

from tlt_server import __version__
from tlt_server.errors import StartupError

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

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
