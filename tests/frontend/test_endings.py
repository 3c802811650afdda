"""Every request ends: by its deadline, while the server drains, and after the engine has died."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.frontend.fake_engine import DIES, HANGS
from tests.frontend.live_server import LiveServer, server_and_client
from tests.frontend.test_limits import LONG, server
from tests.waiting import meanwhile, until
from tlt_client import Client, ServerError
from tlt_client.wire import ItemResult
from tlt_server.frontend.link.submission import Submission

__all__ = ["server"]  # fixtures


def test_a_deadline_ends_only_unfinished_items(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expiring = list[tuple[float, Callable[[], None]]]()
    began_s = time.monotonic()
    with Client(server.url, timeout_s=60) as client, ThreadPoolExecutor(1) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(Submission, "expire_at", lambda self, *given: expiring.append(given))
            asked = pool.submit(
                client.generate,
                [{"prompt": "a"}, {"token_ids": [HANGS], "n": 2}],
                sampling={"max_tokens": 2},
                timeout_s=1.5,
            )
            until(lambda: expiring and len(server.client) == 2)
        ((deadline_s, expire),) = expiring
        assert began_s + 1.5 <= deadline_s <= time.monotonic() + 1.5
        server.call(expire)
        done, late = asked.result().results
    assert done.choices and late.error is not None and late.error.code == "deadline_exceeded"
    response = httpx.post(f"{server.url}/generate", json=LONG | {"timeout_s": 0.1})
    assert response.status_code == 504
    until(lambda: not server.engine.running)


def test_deadline_after_the_last_result_aborts_no_sequence(server: LiveServer) -> None:
    with (
        httpx.Client() as other,
        other.stream("POST", f"{server.url}/generate", json=LONG | {"stream": True}),
    ):
        until(lambda: len(server.client) == 1)
        before = len(server.engine.aborted)
        server.call(lambda: server.client.sequences.expire(Submission([], lambda submission: None)))
        time.sleep(0.1)
        assert len(server.client) == 1 and server.engine.running
        assert len(server.engine.aborted) == before
    until(lambda: len(server.client) == 0)


def test_a_streamed_deadline_is_an_error_event(server: LiveServer) -> None:
    with Client(server.url, timeout_s=30) as client:
        events = list(client.stream([{"token_ids": [HANGS]}], timeout_s=0.1))
    assert [
        event.error.code for event in events if isinstance(event, ItemResult) and event.error
    ] == ["deadline_exceeded"]


def test_draining_finishes_running_requests_only(model: Path) -> None:
    with server_and_client(model, engine={"step_s": 0.02}) as (server, client):
        running = meanwhile(
            lambda: client.generate([{"prompt": "abc"}], sampling={"max_tokens": 240})
        )
        until(lambda: len(server.client) == 1)
        server.call(lambda: setattr(server.client, "draining", True))
        response = httpx.post(f"{server.url}/generate", json={"requests": [{"prompt": "a"}]})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
        assert int(response.headers["retry-after"]) >= 1
        assert httpx.get(f"{server.url}/readyz").status_code == 503
        assert httpx.get(f"{server.url}/livez").status_code == 200
        assert running.result(30).results[0].choices[0].finish_reason == "length"


def test_engine_death_beyond_max_restarts_ends_open_requests(model: Path) -> None:
    with server_and_client(model, max_restarts=0) as (server, client):
        waiting = meanwhile(
            lambda: client.generate([{"token_ids": [HANGS]}, {"token_ids": [HANGS], "n": 2}])
        )
        until(lambda: len(server.client) == 3)
        last = client.generate([{"token_ids": [DIES]}])
        for result in [*last.results, *waiting.result(30).results]:
            assert result.error is not None and result.error.code == "engine_failed"
            assert "status 7" in result.error.message
        for path, status in (("/livez", 503), ("/readyz", 503), ("/startupz", 200)):
            assert httpx.get(server.url + path).status_code == status
        with pytest.raises(ServerError) as caught:
            client.generate([{"prompt": "a"}])
        assert caught.value.status == 503


def test_unreadable_event_ends_open_requests(model: Path) -> None:
    with server_and_client(model) as (server, client):
        waiting = meanwhile(lambda: client.generate([{"token_ids": [HANGS]}]))
        until(lambda: len(server.client) == 1)
        server.call(lambda: asyncio.ensure_future(server.engine._events.send(b"\x81garbage")))
        assert waiting.result(30).results[0].error.code == "engine_failed"
