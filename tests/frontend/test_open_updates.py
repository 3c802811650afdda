"""A weight update left open by its trainer: pushes of others do not succeed, the update is shown,
and it ends by itself.
"""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from tests.frontend.live_server import LiveServer, live_server, server_and_client
from tests.frontend.test_weight_updates import Story
from tests.waiting import timed, until
from tlt_client import AsyncClient, Client, Retries, errors
from tlt_client.errors import NotLive
from tlt_server.__main__ import main
from tlt_server.errors import Conflict
from tlt_server.wire.commands import AbortWeights


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[LiveServer]:
    with live_server(model, weight_root=tmp_path) as running:
        yield running


def post(server: LiveServer, path: str) -> dict[str, Any]:
    reply = httpx.post(f"{server.url}{path}").raise_for_status()
    return dict(reply.json())


def test_unexpectedly_staged_push_is_an_error(client: Client, server: LiveServer) -> None:
    post(server, "/begin_weight_update")
    with pytest.raises(
        NotLive, match="'v1' is staged, not live: a weight update is open.*/end_weight_update"
    ):
        client.update_weights("p", "v1")
    with Client(server.url, retries=Retries(times=3, first_s=5)) as patient, pytest.raises(NotLive):
        patient.update_weights("p", "v2")
    assert client.update_weights("p", "v3", commit=False)["state"] == "staged"

    async def asked() -> None:
        async with AsyncClient(server.url) as client:
            with pytest.raises(NotLive):
                await client.push_weights("v4", path="p")

    asyncio.run(asked())
    assert len(server.engine.manifests) == 4, "none was sent again"
    assert post(server, "/end_weight_update")["success"]
    assert client.update_weights("p", "v5")["state"] == "committed"


def test_weights_command_shows_an_open_update_and_its_push_fails(
    client: Client, server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def tlt(*words: str) -> tuple[int, str, str]:
        status = main(["weights", *words, "--url", server.url])
        said = capsys.readouterr()
        return status, " ".join(said.out.split()), said.err

    assert client.weights()["update"] is None and "weight update" not in tlt("status")[1]
    post(server, "/start_weight_update")
    status, _, err = tlt("push", str(tmp_path), "--version", "v1")
    assert status == 1 and "'v1' is staged, not live" in err and "/end_weight_update" in err
    update = client.weights()["update"]
    assert update is not None and (update["selector"], update["pushes"]) == ("target", 1)
    assert 0 < update["ends_in_s"] <= 600
    said = tlt("status")[1]
    assert "a weight update of the target has been open for" in said
    assert "POST /end_weight_update commits it" in said
    assert tlt("push", str(tmp_path), "--version", "v2", "--stage")[0] == 0
    post(server, "/begin_weight_update")
    post(server, "/end_weight_update")
    assert client.weights()["update"] is None and client.weights()["target"] == "v0", (
        "begun again, it drops what it held"
    )
    assert tlt("push", str(tmp_path), "--version", "v3")[0] == 0


def test_end_without_an_open_update_is_a_final_conflict(server: LiveServer) -> None:
    assert httpx.post(f"{server.url}/finish_weight_update").status_code == 409
    ended = httpx.post(f"{server.url}/end_weight_update")
    assert ended.status_code == 409 and ended.json()["success"] is False


@pytest.fixture
def logged() -> Iterator[list[Any]]:
    """Warnings, too."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with structlog.testing.capture_logs() as lines:
        yield lines
    structlog.configure(**before)


def test_idle_update_is_dropped_and_reported(model: Path, logged: list[Any]) -> None:
    with server_and_client(model, weight_update_ttl_s=3.0) as (server, client):
        post(server, "/begin_weight_update")
        client.update_weights("p", "v1", commit=False)
        until(lambda: client.weights()["update"] is None)
        with pytest.raises(errors.Conflict, match="ended by itself"):
            client.update_weights("p", "v2")  # perhaps another trainer's, who asks again
        named = {"new_version": "v1"}
        refused = httpx.post(f"{server.url}/update_weight_version", json=named)
        assert refused.status_code == 409 and "ended by itself" in refused.text, (
            "it was meant for what is gone"
        )
        repeated = httpx.post(f"{server.url}/update_weight_version", json=named)
        assert repeated.status_code == 200, "its caller was told to send it again"
        assert httpx.post(f"{server.url}/end_weight_update").status_code == 409
        assert client.update_weights("p", "v2")["state"] == "committed"
        assert (
            httpx.post(
                f"{server.url}/update_weight_version", json={"new_version": "v3"}
            ).status_code
            == 200
        )
        assert [
            command.session != ""
            for command in server.engine.weight_commands
            if isinstance(command, AbortWeights)
        ] == [True]
    (said,) = [line for line in logged if line["event"] == "weight_update_dropped"]
    assert said["log_level"] == "warning" and said["pushes"] == 1
    assert "weight_update_ttl_s" in said["remedy"]


def test_running_calls_keep_an_update_open_past_its_ttl() -> None:
    async def told() -> None:
        story = Story(stages=True)
        session = story.twin.session
        session._ttl_s = 0.3
        await story.after("start", "push slow")
        await asyncio.sleep(0.6)
        assert session.status is not None, "a body is on its way"
        await story.after("body", "settle", "finish named", "settle")
        assert story.twin.live[0] == "step 1" and session.status is None
        await story.after("start", "push", "settle")
        await asyncio.sleep(0.6)
        assert session.status is None
        while story.twin.queue:
            await story.after("do")
        assert story.twin.open is None and story.twin.live[0] == "step 1", "what it held is dropped"
        with pytest.raises(Conflict, match="weight_update_ttl_s"):
            await session.end("late")
        await asyncio.gather(*story.tasks)

    timed(told())


def test_ended_or_restarted_update_is_not_dropped_again() -> None:
    async def told() -> None:
        story = Story(stages=True)
        session = story.twin.session
        session._ttl_s = 2.0
        await story.after("start")
        await asyncio.sleep(1.2)
        await story.after("start")
        await asyncio.sleep(1.2)
        assert session.status is not None, "its own time has begun with it"
        await asyncio.sleep(1.2)
        assert session.status is None and not story.twin.queue

    timed(told())
