"""Traces of requests: which spans reach a collector, under whose, and what they hold."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.frontend.live_server import live_server, server_and_client
from tlt_client.rpc import GetInfoRequest, RolloutServiceStub
from tlt_server.config import load
from tlt_server.errors import StartupError
from tlt_server.frontend.http.access import FLUSH_S, OtlpTraces

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{CALLER}-01"


class Collector:
    """A collector that keeps what it is sent. Read it after the server has ended."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.url = ""

    @property
    def spans(self) -> list[Span]:
        sent = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        return [
            span
            for each in sent
            for resource in each.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            collector.bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def attributes(span: Span) -> dict[str, str | int | float]:
    return {
        each.key: getattr(each.value, str(each.value.WhichOneof("value")))
        for each in span.attributes
    }


def test_request_spans_form_one_trace_under_the_callers_span(model: Path) -> None:
    with collecting() as collector:
        with live_server(model, otlp_endpoint=collector.url) as server:
            body = {
                "requests": [{"prompt": "nightingale", "id": "wren"}],
                "sampling": {"max_tokens": 9},
            }
            headers = {"traceparent": TRACEPARENT, "x-request-id": "step-3"}
            reply = httpx.post(f"{server.url}/generate", json=body, headers=headers)
            assert reply.status_code == 200, reply.text
        (request,) = collector.named("request")
        assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, CALLER)
        assert attributes(request) == {
            "http.request.method": "POST",
            "http.route": "/generate",
            "http.response.status_code": 200,
            "tlt.request_id": "step-3",
        }
        parts = {name: collector.named(name)[0] for name in ("queue", "prefill", "decode")}
        assert len(collector.spans) == 4
        for part in parts.values():
            assert part.trace_id.hex() == TRACE and part.parent_span_id == request.span_id
        times = [parts["queue"].start_time_unix_nano]
        for part in parts.values():
            assert abs(part.start_time_unix_nano - times[-1]) < 5e7
            times.append(part.end_time_unix_nano)
        assert times == sorted(times) and request.start_time_unix_nano <= times[0] + 5e7
        assert attributes(parts["prefill"])["gen_ai.usage.input_tokens"] == len("nightingale")
        assert attributes(parts["decode"]) == {
            "gen_ai.usage.output_tokens": 9,
            "tlt.finish_reason": "length",
        }
        sent = b"".join(collector.bodies)
        assert b"nightingale" not in sent and b"wren" not in sent
        assert b"tlt-server" in sent


def test_pushes_have_a_span_but_probes_have_no_span(model: Path) -> None:
    with collecting() as collector:
        with server_and_client(model, otlp_endpoint=collector.url) as (server, client):
            client.update_weights("p", "v1", role="target")
            client.weights()
            for path in ("livez", "readyz", "health", "startupz", "metrics"):
                httpx.get(f"{server.url}/{path}")
        (push,) = collector.named("push")
        by_route = {attributes(span)["http.route"]: span for span in collector.named("request")}
        assert set(by_route) == {"/update_weights", "/weights"}
        assert push.parent_span_id == by_route["/update_weights"].span_id
        held = attributes(push)
        assert (held["tlt.role"], held["tlt.version"]) == ("target", "v1")
        assert held["tlt.result"] == "committed"


def test_only_valid_sampled_trace_contexts_are_followed(model: Path) -> None:
    with (
        collecting() as collector,
        live_server(model, otlp_endpoint=collector.url, grpc_port=0) as server,
        grpc.insecure_channel(server.grpc_address) as channel,
    ):
        invalid = ["", "zz", "00-" + "0" * 32 + f"-{CALLER}-01", "x" * 5000]
        for given in (*invalid, TRACEPARENT[:-2] + "00"):
            httpx.get(f"{server.url}/server_info", headers={"traceparent": given})
        metadata = (("traceparent", TRACEPARENT),)
        RolloutServiceStub(channel).GetInfo(GetInfoRequest(), metadata=metadata)
    *own, over_grpc = collector.spans
    assert len({span.trace_id for span in own}) == len(own) == len(invalid)
    assert not any(span.parent_span_id for span in own)
    assert (over_grpc.trace_id.hex(), over_grpc.parent_span_id.hex()) == (TRACE, CALLER)


def test_missing_trace_collector_delays_requests_only_briefly() -> None:
    traces = OtlpTraces("http://127.0.0.1:9")
    began_s = time.monotonic()
    for _ in range(5000):  # more than the queue holds
        traces.begin([]).end(failed=False)
    assert time.monotonic() - began_s < 5
    began_s = time.monotonic()
    traces.close()
    assert time.monotonic() - began_s < 2 * FLUSH_S


def test_tracing_without_the_opentelemetry_sdk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(StartupError, match=r"pip install 'tlt-server\[otlp\]'"):
        OtlpTraces("http://127.0.0.1:4318")


@pytest.mark.parametrize("url", ["127.0.0.1:4318", "grpc://x:4317", "http://", "http://a b"])
def test_trace_endpoint_that_is_not_a_url_is_refused(model: Path, url: str) -> None:
    with pytest.raises(StartupError, match="it must be a URL such as http://127.0.0.1:4318"):
        load({"model": str(model), "otlp_endpoint": url})
