"""Rollouts: detached and keyed batches go on without their client, are fetched and forgotten."""

import stat
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.frontend.fake_engine import FAILS, HANGS
from tests.frontend.live_server import LiveServer, server_and_client, serving
from tests.waiting import meanwhile, until
from tlt_client import Client, ServerError
from tlt_server.frontend.http.keys import EVERYBODY
from tlt_server.wire.packed import PackedIds

ITEMS: list[Any] = [{"id": "b", "prompt": "xyz", "n": 2}, {"id": "a", "prompt": "hello world"}]
FIELDS: dict[str, Any] = {"max_tokens": 40, "logprobs": 1, "prompt_logprobs": 0, "stop": ["ld"]}
HANGING: dict[str, Any] = {"requests": [{"token_ids": [HANGS]}], "detach": True}
QUICK: dict[str, Any] = {"requests": [{"prompt": "ab"}], "sampling": {"max_tokens": 4}}


# A few steps are seen before a batch ends.
slow = serving(engine={"step_s": 0.02})


def await_waiter(server: LiveServer, id: str) -> None:
    """Wait until a request waits for the end of a rollout."""
    until(lambda: server.call(lambda: server.rollouts.find(id, EVERYBODY)._over._callbacks))  # type: ignore[attr-defined]


def test_detached_batch_has_the_reply_of_an_awaited_one(client: Client) -> None:
    items = [item | {"seed": 5} for item in ITEMS]
    waited = client.generate(items, sampling=FIELDS)
    rollout = client.generate(items, sampling=FIELDS, detach=True)
    assert rollout.result(30) == waited
    assert rollout.result(30) == waited  # from the journal: it is no longer in memory


def test_only_the_journal_of_a_rollout_holds_its_prompt_on_disk(
    model: Path, tmp_path: Path
) -> None:
    canary: dict[str, Any] = {"token_ids": [*b"a canary sings"], "id": "a"}
    held = (
        bytes(PackedIds.of(canary["token_ids"]).packed),
        msgspec.msgpack.encode(canary["token_ids"]),
    )

    def found(server: LiveServer) -> list[Path]:
        files = [file for root in (tmp_path, server.directory) for file in root.rglob("*")]
        return [
            file
            for file in files
            if file.is_file()
            and any(form in file.read_bytes() for form in (*held, b"canary sings"))
        ]

    with server_and_client(model, state_dir=tmp_path) as (server, client):
        client.generate([canary])
        assert found(server) == []
        rollout = client.generate([canary], detach=True)
        rollout.result(30)
        (journal,) = found(server)
        assert stat.S_IMODE(journal.stat().st_mode) == 0o600
        rollout.delete()
        assert found(server) == []


def test_running_rollouts_show_results_and_progress(slow: LiveServer) -> None:
    with Client(slow.url, timeout_s=40) as client:
        rollout = client.generate(
            [
                {"id": "long", "prompt": "abc"},
                {"id": "short", "prompt": "abc", "sampling": {"max_tokens": 3}},
            ],
            sampling={"max_tokens": 400},
            detach=True,
        )
        first = rollout.fetch()
        assert first.status == "running" and first.progress.items == 2
        until(lambda: rollout.fetch().results)
        part = rollout.fetch()
        assert (part.status, [result.id for result in part.results]) == ("running", ["short"])
        assert part.progress.items_ended == 1
        assert 3 < part.progress.tokens < 403 and part.usage.completion_tokens == 3
        [kept] = [summary for summary in client.rollouts() if summary.id == rollout.id]
        assert (kept.status, kept.detached, kept.done_s) == ("running", True, None)
        assert kept.bytes > 0
        whole = rollout.fetch(wait_s=30)
        assert whole.status == "done"
        assert [result.id for result in whole.results] == ["long", "short"]
        assert whole.progress.tokens == whole.usage.completion_tokens == 403


def test_rollout_poll_ends_when_its_wait_time_is_over(server: LiveServer) -> None:
    with Client(server.url, timeout_s=30) as client:
        rollout = client.generate([{"token_ids": [HANGS]}], detach=True)
        started = time.monotonic()
        assert rollout.fetch(wait_s=0.2).status == "running"
        assert 0.19 < time.monotonic() - started < 20
        with pytest.raises(TimeoutError, match="it continues"):
            rollout.result(0.1)
        rollout.delete()


def test_deleted_rollout_is_aborted_and_forgotten(server: LiveServer) -> None:
    with Client(server.url, timeout_s=30) as client:
        rollout = client.generate([{"token_ids": [HANGS], "n": 2}], detach=True)
        until(lambda: len(server.client) == 2)
        waiting = meanwhile(
            lambda: httpx.get(f"{server.url}/rollouts/{rollout.id}?wait_s=60", timeout=70)
        )
        await_waiter(server, rollout.id)
        path = server.directory / "rollouts" / f"{rollout.id}.journal"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        rollout.delete()
        assert waiting.result(30).json()["error"]["code"] == "cancelled"
        until(lambda: len(server.client) == 0 and not server.engine.running)
        assert not path.exists()
        for again in (rollout.fetch, rollout.delete):
            with pytest.raises(ServerError, match="rollout_ttl_s") as caught:
                again()
            assert (caught.value.status, caught.value.code) == (404, "not_found")


def test_failed_items_carry_their_error_and_are_fetched_with_200(client: Client) -> None:
    some = client.generate(
        [{"token_ids": [FAILS]}, {"prompt": "a"}], sampling={"max_tokens": 2}, detach=True
    ).result(30)
    assert some.results[0].error is not None and some.results[0].error.code == "engine_failed"
    assert some.results[1].choices
    none = client.generate([{"token_ids": [FAILS], "n": 3}], detach=True).result(30)
    assert [result.error and result.error.code for result in none.results] == ["engine_failed"]


def test_a_deadline_ends_a_detached_rollout(client: Client, server: LiveServer) -> None:
    rollout = client.generate(
        [{"token_ids": [HANGS]}, {"prompt": "a"}],
        sampling={"max_tokens": 2},
        timeout_s=2.0,
        detach=True,
    )
    late, done = rollout.result(30).results
    assert late.error is not None and late.error.code == "deadline_exceeded" and done.choices
    until(lambda: not server.engine.running)


def test_rollout_id_stays_one_segment_of_the_path(client: Client) -> None:
    with pytest.raises(ServerError) as refused:
        client.rollout("../weights?x#y").fetch()
    assert refused.value.status == 404 and "weights" in refused.value.message


# idempotency keys


def post(server: LiveServer, key: str | bytes | None = None, **body: Any) -> httpx.Response:
    headers = (
        [(b"idempotency-key", key.encode() if isinstance(key, str) else key)]
        if key is not None
        else []
    )
    return httpx.post(f"{server.url}/generate", json=QUICK | body, headers=headers, timeout=30)


def test_repeated_idempotency_key_gets_the_same_reply_runs_once(server: LiveServer) -> None:
    first = post(server, "once")
    ran = len(server.engine.submitted)
    again = post(server, "once")
    assert first.status_code == 200 and first.content == again.content
    assert len(server.engine.submitted) == ran
    assert first.headers["x-rollout-id"] == again.headers["x-rollout-id"]
    assert (
        post(server, "another").json()["results"][0]["choices"][0]["seed"]
        != first.json()["results"][0]["choices"][0]["seed"]
    )
    fetched = httpx.get(f"{server.url}/rollouts/{first.headers['x-rollout-id']}").json()
    assert fetched["status"] == "done" and fetched["results"] == first.json()["results"]


def test_idempotency_key_with_a_different_body_is_a_conflict(server: LiveServer) -> None:
    post(server, "bodies")
    response = post(server, "bodies", sampling={"max_tokens": 5})
    assert (response.status_code, response.json()["error"]["code"]) == (409, "conflict")
    assert post(server, "bodies").status_code == 200


def test_refused_request_leaves_its_idempotency_key_free(server: LiveServer) -> None:
    assert post(server, "free", requests=[{"token_ids": [10**6]}]).status_code == 400
    assert post(server, "free").status_code == 200


def test_repeated_idempotency_key_gets_the_same_error_status(server: LiveServer) -> None:
    first, again = (post(server, "fails", requests=[{"token_ids": [FAILS]}]) for _ in range(2))
    assert first.status_code == again.status_code == 500 and first.content == again.content


def test_simultaneous_requests_with_one_idempotency_key_run_once(slow: LiveServer) -> None:
    before = len(slow.engine.submitted)
    replies: list[httpx.Response] = []
    threads = [
        threading.Thread(
            target=lambda: replies.append(post(slow, "crowd", sampling={"max_tokens": 30}))
        )
        for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(replies) == 12 and len({reply.content for reply in replies}) == 1
    assert len(slow.engine.submitted) == before + 1


def test_idempotent_request_continues_after_its_client_leaves(slow: LiveServer) -> None:
    aborted = len(slow.engine.aborted)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{slow.url}/generate",
            json=QUICK | {"sampling": {"max_tokens": 60}},
            headers={"idempotency-key": "left"},
            timeout=httpx.Timeout(30, read=0.1),
        )
    reply = post(slow, "left", sampling={"max_tokens": 60})
    assert len(reply.json()["results"][0]["choices"][0]["token_ids"]) == 60
    assert len(slow.engine.aborted) == aborted


def test_a_detached_request_with_a_key_gives_the_same_id(server: LiveServer) -> None:
    first, again = (post(server, "detached", detach=True) for _ in range(2))
    assert first.status_code == again.status_code == 202
    assert first.json()["id"] == again.json()["id"] == first.headers["x-rollout-id"]


# what hostile clients send


@pytest.mark.parametrize("key", ["", "a b", "a\tb", "é", "x" * 257, b"\xff\xfe"])
def test_invalid_idempotency_key_is_refused_by_name(server: LiveServer, key: str | bytes) -> None:
    response = post(server, key.encode("latin-1") if isinstance(key, str) else key)
    assert response.status_code == 400 and "Idempotency-Key" in response.json()["error"]["message"]
    assert post(server, "~" * 256).status_code == 200


@pytest.mark.parametrize(
    ("key", "body"), [(None, {"detach": True}), ("k", {}), ("k", {"detach": True})]
)
def test_detached_rollout_cannot_be_streamed(
    server: LiveServer, key: str | None, body: dict[str, Any]
) -> None:
    response = post(server, key, stream=True, **body)
    assert response.status_code == 400
    assert "leave one of the two out" in response.json()["error"]["message"]


def test_ineffective_idempotency_key_is_refused(server: LiveServer) -> None:
    body = {"text": "ab", "sampling_params": {"max_new_tokens": 1}}
    replies = [
        httpx.post(f"{server.url}/generate", json=body, headers=headers)
        for headers in ({}, {"idempotency-key": "k"})
    ]
    assert [reply.status_code for reply in replies] == [200, 400]
    assert "leave the header out" in replies[1].json()["error"]["message"]


@pytest.mark.parametrize(
    "id",
    ["x", "..%2f..%2fetc%2fpasswd", "r-" + "0" * 32, "%00", "é" * 300, "lock", "*", "x" * 5000],
)
def test_malformed_rollout_id_is_not_found(server: LiveServer, id: str) -> None:
    for method in ("GET", "DELETE"):
        response = httpx.request(method, f"{server.url}/rollouts/{id}")
        assert response.status_code == 404 and len(response.content) < 1000
    assert (server.directory / "rollouts" / "lock").exists()


@pytest.mark.parametrize("wait", ["-1", "61", "nan", "inf", "", "x", "1e999", "1" * 400])
def test_invalid_wait_time_is_refused_by_name(server: LiveServer, wait: str) -> None:
    id = post(server, detach=True).json()["id"]
    response = httpx.get(f"{server.url}/rollouts/{id}", params={"wait_s": wait})
    assert response.status_code == 400 and "wait_s" in response.json()["error"]["message"]
