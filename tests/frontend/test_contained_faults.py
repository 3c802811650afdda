"""Faults between an engine's event and those who wait for it: no such fault is the engine's."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.frontend.live_server import LiveServer, live_server
from tests.waiting import until
from tlt_client import Client
from tlt_server.process.faults import Containment

pytestmark = pytest.mark.contains_faults


ITEM: Any = {"token_ids": [70, 71, 72], "sampling": {"max_tokens": 7}}


def broken(*args: Any, **options: Any) -> Any:
    raise ValueError("Counters can only be incremented by non-negative amounts")


@pytest.fixture
def server(model: Path) -> Iterator[LiveServer]:
    """Return a server, whose engine must be the first one when the test ends."""
    with live_server(model, max_restarts=0) as running:
        yield running
        assert len(running.engines) == 1 and not running.client.replica.failure


def counted(server: LiveServer) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    (line,) = [x for x in text.splitlines() if x.startswith("tlt_contained_faults_total")]
    return float(line.split()[1])


def generated(server: LiveServer) -> list[int]:
    with Client(server.url, timeout_s=30) as client:
        [result] = client.generate([ITEM]).results
    assert result.error is None
    return [*result.choices[0].token_ids]


PLACES: dict[str, Callable[[LiveServer], tuple[Any, str]]] = {
    "the engine's figures": lambda server: (server.client._metrics.engine, "took"),
    "a step's figures": lambda server: (server.client._metrics.engine._steps, "count"),
    "the forecast": lambda server: (server.client.admission, "stepped"),
    "the queue's figures": lambda server: (server.client.admission, "take"),
    "what outputs teach": lambda server: (server.client.admission.forecast, "ended"),
    "who is open": lambda server: (server.client._metrics.sequences.open, "set"),
    "a sequence's figures": lambda server: (
        server.service.generations.metrics.sequences.generated,
        "inc",
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_failing_metric_ends_no_request(
    place: str, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, before = generated(server), Containment.total
    with monkeypatch.context() as patched:
        patched.setattr(*PLACES[place](server), broken)
        assert generated(server) == plain
    assert counted(server) == Containment.total - before > 0
    if place != "the queue's figures":
        server.call(server.client.admission.check)
    assert generated(server) == plain and len(server.client) == 0


def test_unusable_output_ends_only_its_sequence(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tlt_server.frontend.link.submission import Route

    took = Route.take

    def some(route: Route, output: Any) -> None:
        broken() if route.request.token_ids[0] == 66 else took(route, output)

    monkeypatch.setattr(Route, "take", some)
    with Client(server.url, timeout_s=30) as client:
        good, bad = client.generate([{"token_ids": [65]}, {"token_ids": [66]}]).results
    assert good.error is None and bad.error is not None and bad.error.code == "engine_failed"
    until(lambda: not server.engine.running)  # the engine was told
    server.call(server.client.admission.check)
    assert counted(server) == 1 and len(server.client) == 0


def test_an_unsendable_batch_ends_alone(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = generated(server)
    with Client(server.url, timeout_s=30) as client, monkeypatch.context() as patched:
        patched.setattr(server.client.replica, "send", broken)
        [result] = client.generate([{"token_ids": [65]}]).results
    assert result.error is not None and result.error.code == "engine_failed"
    assert generated(server) == plain and len(server.client) == 0


def test_reports_are_answered_though_their_figures_fail(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.client
    for owner, name in (
        (client._metrics.weights, "reported"),
        (client.versions, "reported"),
        (client.activity, "sleeps"),
    ):
        monkeypatch.setattr(owner, name, broken)
    with Client(server.url, timeout_s=30) as asking:
        assert asking.push_weights("v7", channel="disk", path="/none")["version"] == "v7"
        asking.pause()
        asking.resume()
    assert counted(server) >= 4


def test_only_unreadable_events_are_blamed_on_the_engine(model: Path) -> None:
    with live_server(model, max_restarts=5) as server:
        server.call(lambda: server.engine._events.send(b"\x93none"))
        until(lambda: len(server.engines) == 2 and not server.client.replica.failure)
        assert "could not be read" in server.said.getvalue() and generated(server)
