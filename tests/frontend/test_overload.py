"""Too much load is refused at once, typed, and with the time after which to come again; what could
never pass is told so.
"""

import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.frontend.fake_engine import HANGS, LATE
from tests.frontend.live_server import LiveServer, live_server
from tests.frontend.test_limits import LONG, connect, head, read_all
from tests.waiting import until
from tlt_server.frontend.http import limits
from tlt_server.wire.records import OFF, Cycle, StepContext


@pytest.mark.parametrize(
    ("path", "envelope"),
    [("/generate", b'{"error":{"code":"unavailable"'), ("/v1/completions", b'"type":')],
)
def test_request_beyond_max_queue_gets_a_typed_503(model: Path, path: str, envelope: bytes) -> None:
    with (
        live_server(model, max_connections=2) as server,
        connect(server) as first,
        connect(server) as second,
    ):
        body = json.dumps(LONG).encode()
        for connection in (first, second):
            connection.sendall(head(content_length=len(body)) + body)
        until(lambda: len(server.client) == 2)
        with connect(server) as third:
            third.sendall(head(path, content_length=2) + b"{}")
            reply = read_all(third)
        assert reply.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in reply
        assert b"connection: close" in reply.lower()
        assert envelope in reply
        assert b"3 requests are in progress; the limit is 2 (max_connections)" in reply
        assert httpx.get(f"{server.url}/livez").status_code == 200
        second.close()
        until(lambda: httpx.get(f"{server.url}/server_info").status_code == 200)


def test_refused_request_keeps_its_slot_until_its_body_ends(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live_server(model, max_connections=1) as server, connect(server) as first:
        body = json.dumps(LONG).encode()
        first.sendall(head(content_length=len(body)) + body)
        until(lambda: len(server.client) == 1)
        with connect(server) as refused:
            refused.sendall(head(content_length=2) + b"{")
            assert b" 503 " in refused.recv(65536)
            monkeypatch.setattr(limits, "STALLED_S", 0.0)
            assert httpx.get(f"{server.url}/server_info").status_code == 503


def full(server: LiveServer, *, tokens_per_s: float = 100.0) -> None:
    """Teach the forecast: steps of a full engine at this rate of tokens, ends of sequences at half
    of max_tokens.
    """

    def teach() -> None:
        cycle = Cycle(
            context=StepContext(8, 0, 10.0, 0),
            strategy=OFF,
            rows=8,
            emitted=int(tokens_per_s),
            accepted=(),
            drafted=0,
            step_s=1.0,
        )
        for _ in range(20):
            server.client.admission.stepped(cycle, waiting=1)
        for _ in range(20):
            server.client.admission.forecast.ended(50, 100)

    server.call(teach)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/generate",
            {"requests": [{"prompt": "abc"}], "sampling": {"max_tokens": 100}, "timeout_s": 20},
        ),
        (
            "/generate",
            {
                "requests": [{"prompt": "abc"}],
                "sampling": {"max_tokens": 100},
                "timeout_s": 20,
                "stream": True,
            },
        ),
        ("/generate", {"requests": [{"prompt": "abc"}], "queue_timeout_s": 20}),
        ("/v1/completions", {"prompt": "abc", "max_tokens": 100}),
    ],
)
def test_request_predicted_too_late_gets_retry_after_at_once(
    model: Path, path: str, body: dict[str, Any]
) -> None:
    with live_server(model, default_timeout_s=20.0 if path.startswith("/v1") else 100.0) as server:
        full(server, tokens_per_s=10.0)
        encoded: list[Any] = []
        server.call(
            lambda: server.text.__setattr__(
                "encode", lambda *texts, **options: encoded.append(texts)
            )
        )
        waits = {
            "requests": [{"token_ids": [HANGS], "n": 20}],
            "sampling": {"max_tokens": 100},
            "stream": True,
        }
        with httpx.Client() as other, other.stream("POST", f"{server.url}/generate", json=waits):
            until(lambda: len(server.client) == 20)
            started = time.monotonic()
            response = httpx.post(server.url + path, json=body)
            assert time.monotonic() - started < 20, "and not when its time was up"
            error = response.json()["error"]
            assert response.status_code == 429 and error["code"] == "overloaded", error
            # 13 of 20 must end first, of 50 tokens each: 65 s, with caution 98 s
            assert re.search(
                r"and it has (20\.0|1?\d\.\d) s \((queue_)?timeout_s\)", error["message"]
            ), "what is left of its time"
            assert 65 <= int(response.headers["retry-after"]) <= 66
            assert encoded == [] and len(server.client) == 20
            metrics = httpx.get(f"{server.url}/metrics").text
            assert 64 < float(metrics.partition("\ntlt_forecast_wait_seconds ")[2].split()[0]) < 66
            assert "\ntlt_open_tokens 2020.0" in metrics
            assert 'tlt_requests_rejected_total{reason="overloaded"} 1.0' in metrics
        until(lambda: len(server.client) == 0 and server.client.admission.tokens == 0)


def hundreds(n: int) -> dict[str, Any]:
    return {"requests": [{"token_ids": [1] * 100, "n": n}], "sampling": {"max_tokens": 1}}


def test_queue_full_of_tokens_or_pages_refuses_requests(model: Path) -> None:
    with live_server(model, max_queue_tokens=500, max_page_forecast=1.0) as server:
        one = {"requests": [{"token_ids": [HANGS] * 100}], "sampling": {"max_tokens": 300}}
        with (
            httpx.Client() as other,
            other.stream("POST", f"{server.url}/generate", json=one | {"stream": True}),
        ):
            until(lambda: len(server.client) == 1)
            response = httpx.post(f"{server.url}/generate", json=one)
            assert response.status_code == 429
            assert "400 tokens are open and 400 more are over the limit of 500" in response.text
            assert response.headers["retry-after"] == "1"
        response = httpx.post(f"{server.url}/generate", json=hundreds(8))
        assert response.status_code == 413 and "808 tokens (prompt + max_tokens)" in response.text
        assert "split it" in response.text
    with live_server(model, max_page_forecast=1.0) as server:
        one = {"requests": [{"token_ids": [HANGS] * 100}], "sampling": {"max_tokens": 300}}
        with (
            httpx.Client() as other,
            other.stream("POST", f"{server.url}/generate", json=one | {"stream": True}),
        ):
            until(lambda: len(server.client) == 1)
            response = httpx.post(f"{server.url}/generate", json=hundreds(20))
            assert response.status_code == 429
            assert "135 more are over the limit of 64 (max_page_forecast" in response.text
        until(lambda: not len(server.client) and server.client.admission.tokens == 0)
        assert httpx.post(f"{server.url}/generate", json=hundreds(20)).status_code == 200  # alone


def test_a_full_queue_parses_no_body(model: Path) -> None:
    with live_server(model, max_queue=1) as server, httpx.Client() as other:
        with other.stream("POST", f"{server.url}/generate", json=LONG | {"stream": True}):
            until(lambda: len(server.client) == 1)
            for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
                assert httpx.post(server.url + path, content=b"no json").status_code == 429
            assert httpx.post(f"{server.url}/tokenize", content=b"no json").status_code == 400
        until(lambda: len(server.client) == 0)
        until(lambda: httpx.post(f"{server.url}/generate", content=b"no json").status_code == 400)


def test_queue_timeout_is_kept_by_the_engine_and_returns_429(server: LiveServer) -> None:
    """The engine here is made to say what a real one says of a sequence that it has not begun."""
    response = httpx.post(
        f"{server.url}/generate", json={"requests": [{"token_ids": [LATE]}], "queue_timeout_s": 0.2}
    )
    assert response.status_code == 429
    assert response.json()["results"][0]["error"]["code"] == "queue_timeout"
    assert response.json()["results"][0]["error"]["retryable"]
    assert response.headers["retry-after"] == "1"
    asked = server.engine.submitted[-1]
    assert asked.begin_by_s is not None and 0 < time.monotonic() - (asked.begin_by_s - 0.2) < 30
    response = httpx.post(f"{server.url}/v1/completions", json={"prompt": [LATE]})
    assert response.status_code == 429 and response.json()["error"]["code"] == "queue_timeout"
    assert response.headers["retry-after"] == "1"
    response = httpx.post(
        f"{server.url}/generate", json={"requests": [{"prompt": "a"}], "queue_timeout_s": 3601}
    )
    assert response.status_code == 400
    assert "queue_timeout_s is 3601; the limit is 3600 s (queue_timeout_s)" in response.text
