"""Items that name the weight version that must compute them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.frontend.fake_engine import INFO
from tests.frontend.live_server import LiveServer, server_and_client, serving
from tests.waiting import until
from tlt_client import Client, ServerError
from tlt_client.errors import Conflict
from tlt_client.wire import ItemResult, Token
from tlt_server.errors import Conflict as Refused
from tlt_server.frontend.generation.items import pinned
from tlt_server.frontend.generation.requests import ItemFields

server = serving(scope="function", engine={"step_s": 0.01, "per_step": 1})
PINNED = {"prompt": "abc", "weight_version": "v0"}


def test_item_of_the_live_version_is_generated_under_it(server: LiveServer) -> None:
    with Client(server.url) as client:
        (result,) = client.generate([PINNED], sampling={"max_tokens": 3}).results
        assert [span.version for span in result.choices[0].weight_versions] == ["v0"]


@pytest.mark.parametrize("way", ["whole", "streamed", "detached"])
def test_batch_naming_another_version_is_refused_whole(server: LiveServer, way: str) -> None:
    body = {
        "requests": [{"prompt": "abc"}, {**PINNED, "weight_version": "v9"}],
        "stream": way == "streamed",
        "detach": way == "detached",
    }
    reply = httpx.post(f"{server.url}/generate", json=body)
    assert reply.status_code == 409 and reply.json()["error"]["code"] == "conflict"
    says = "requests[1].weight_version is 'v9', and 'v0' is live"
    assert says in reply.json()["error"]["message"]
    assert server.engine.submitted == []


def test_item_waiting_through_a_push_ends_with_a_conflict(server: LiveServer) -> None:
    with Client(server.url) as client, ThreadPoolExecutor(2) as pool:
        client.pause()
        ask = {"sampling": {"max_tokens": 3}}
        waits = [pool.submit(client.generate, [item], **ask) for item in (PINNED, {"prompt": "x"})]
        until(lambda: client.load() == 2, 20)
        client.update_weights("p", "v1")
        client.resume()
        (failed,), (done,) = (each.result().results for each in waits)
        assert failed.error is not None and failed.error.code == "conflict"
        assert "asks for weight_version 'v0', and 'v1' was pushed" in failed.error.message
        assert done.choices is not None and done.choices[0].weight_versions[0].version == "v1"


def test_push_during_an_item_ends_it_and_no_other(server: LiveServer) -> None:
    with Client(server.url) as client, Client(server.url) as trainer:
        items = [{**PINNED, "id": "pinned", "n": 2}, {"prompt": "abc", "id": "free"}]
        events = client.stream(items, sampling={"max_tokens": 200})
        next(events)
        trainer.update_weights("p", "v1")
        found = [*events]
        results = {event.id: event for event in found if isinstance(event, ItemResult)}
        pinned_error = results["pinned"].error
        assert pinned_error is not None and pinned_error.code == "conflict"
        assert results["free"].choices is not None
        assert [span.version for span in results["free"].choices[0].weight_versions] == ["v0", "v1"]
        ended = found.index(results["pinned"])
        after = [event for event in found[ended:] if isinstance(event, Token)]
        assert {event.id for event in after} == {"free"}, "no token of the pinned item follows"
        until(lambda: trainer.load() == 0, 20)


def test_detached_item_keeps_its_version_over_a_restart(model: Path, tmp_path: Path) -> None:
    with server_and_client(model, state_dir=tmp_path) as (_, client):
        client.pause()
        rollout = client.generate([PINNED], sampling={"max_tokens": 3}, detach=True)
    with server_and_client(model, state_dir=tmp_path) as (second, client):
        result = client.rollout(rollout.id).result(30).results[0]
        assert result.choices is not None
        assert second.engine.submitted[-1].weight_version == "v0"


def test_pinned_adapter_item_names_both_versions() -> None:
    info = msgspec.structs.replace(INFO, weight_version="v7~0123456789ab", adapters={"math": "a2"})
    item = ItemFields(prompt="a", weight_version="v7")
    assert pinned("", item, info) == "v7~0123456789ab"
    with_adapter = msgspec.structs.replace(item, lora="math")
    assert pinned("", with_adapter, info) == "v7~0123456789ab+math@a2"
    assert pinned("", msgspec.structs.replace(with_adapter, weight_version=""), info) == ""
    with pytest.raises(Refused, match=r"weight_version is 'v6', and 'v7~0123456789ab' is live"):
        pinned("", msgspec.structs.replace(item, weight_version="v6"), info)


def test_overlong_version_is_refused(server: LiveServer) -> None:
    with Client(server.url) as client, pytest.raises(ServerError) as caught:
        client.generate([{"prompt": "a", "weight_version": "v" * 257}])
    assert not isinstance(caught.value, Conflict) and caught.value.status in (400, 422)
