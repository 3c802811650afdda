"""Rollouts: detached and keyed batches go on without their client, are fetched, bounded, forgotten,
and resumed by the next server.
"""

from __future__ import annotations

import asyncio
import os
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.frontend.fake_engine import FAILS, HANGS
from tests.frontend.live_server import LiveServer, live_server
from tests.frontend.test_limits import eventually
from tests.frontend.test_supervisor import OFTEN, die
from tests.frontend.tiny_model import write_model
from tlt_client import AsyncClient, Client, Reply, ServerError
from tlt_client.wire import Choice
from tlt_server.errors import StartupError, StorageFailed
from tlt_server.events import WeightState
from tlt_server.frontend.http.keys import EVERYBODY
from tlt_server.frontend.rollouts.journal import Journal, past
from tlt_server.frontend.rollouts.rollouts import Rollouts
from tlt_server.metrics import Metrics

ITEMS: list[Any] = [{"id": "b", "prompt": "xyz", "n": 2}, {"id": "a", "prompt": "hello world"}]
FIELDS: dict[str, Any] = {"max_tokens": 40, "logprobs": 1, "prompt_logprobs": 0, "stop": ["ld"]}
HANGING: dict[str, Any] = {"requests": [{"token_ids": [HANGS]}], "detach": True}
QUICK: dict[str, Any] = {"requests": [{"prompt": "ab"}], "sampling": {"max_tokens": 4}}


@pytest.fixture(scope="module")
def slow(model: Path) -> Iterator[LiveServer]:
    """A few steps are seen before a batch ends."""
    with live_server(model, engine={"step_s": 0.02}) as running:
        yield running


def await_waiter(server: LiveServer, id: str) -> None:
    """Wait until a request waits for the end of a rollout."""
    eventually(lambda: server.call(lambda: server.rollouts.find(id, EVERYBODY)._over._callbacks))  # type: ignore[attr-defined]


def choices(reply: Reply) -> dict[str, list[Choice]]:
    return {result.id: list(result.choices) for result in reply.results}


def test_a_detached_batch_has_the_reply_of_one_that_was_waited_for(client: Client) -> None:
    items = [item | {"seed": 5} for item in ITEMS]
    waited = client.generate(items, sampling=FIELDS)
    rollout = client.generate(items, sampling=FIELDS, detach=True)
    assert rollout.result(30) == waited
    assert rollout.result(30) == waited  # from the journal: it is no longer in memory


def test_results_come_as_items_end_and_progress_says_how_far_it_is(slow: LiveServer) -> None:
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
        eventually(lambda: rollout.fetch().results)
        part = rollout.fetch()
        assert (part.status, [result.id for result in part.results], part.progress.items_ended) == (
            "running",
            ["short"],
            1,
        )
        assert 3 < part.progress.tokens < 403 and part.usage.completion_tokens == 3
        [kept] = [summary for summary in client.rollouts() if summary.id == rollout.id]
        assert (kept.status, kept.detached, kept.done_s) == (
            "running",
            True,
            None,
        ) and kept.bytes > 0
        whole = rollout.fetch(wait_s=30)
        assert (whole.status, [result.id for result in whole.results]) == (
            "done",
            ["long", "short"],
        )
        assert whole.progress.tokens == whole.usage.completion_tokens == 403


def test_a_poll_ends_when_its_time_is_up(server: LiveServer) -> None:
    with Client(server.url, timeout_s=30) as client:
        rollout = client.generate([{"token_ids": [HANGS]}], detach=True)
        started = time.monotonic()
        assert (
            rollout.fetch(wait_s=0.2).status == "running" and 0.19 < time.monotonic() - started < 20
        )
        with pytest.raises(TimeoutError, match="it goes on"):
            rollout.result(0.1)
        rollout.delete()


def test_deleting_aborts_and_forgets(server: LiveServer) -> None:
    with Client(server.url, timeout_s=30) as client:
        rollout = client.generate([{"token_ids": [HANGS], "n": 2}], detach=True)
        eventually(lambda: len(server.client) == 2)
        waiting: list[Any] = []
        thread = threading.Thread(
            target=lambda: waiting.append(
                httpx.get(f"{server.url}/rollouts/{rollout.id}?wait_s=60", timeout=70)
            )
        )
        thread.start()
        await_waiter(server, rollout.id)
        path = server.directory / "rollouts" / f"{rollout.id}.journal"
        assert (
            stat.S_IMODE(path.stat().st_mode) == 0o600
            and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        )
        rollout.delete()
        thread.join(30)
        assert waiting[0].json()["error"]["code"] == "cancelled"
        eventually(lambda: len(server.client) == 0 and not server.engine.running)
        assert not path.exists()
        for again in (rollout.fetch, rollout.delete):
            with pytest.raises(ServerError, match="rollout_ttl_s") as caught:
                again()
            assert (caught.value.status, caught.value.code) == (404, "not_found")


def test_a_failed_item_is_that_items_error_and_all_failed_is_still_fetched_with_200(
    client: Client,
) -> None:
    some = client.generate(
        [{"token_ids": [FAILS]}, {"prompt": "a"}], sampling={"max_tokens": 2}, detach=True
    ).result(30)
    assert (
        some.results[0].error is not None
        and some.results[0].error.code == "engine_failed"
        and some.results[1].choices
    )
    none = client.generate([{"token_ids": [FAILS], "n": 3}], detach=True).result(30)
    assert [result.error and result.error.code for result in none.results] == ["engine_failed"]


def test_a_deadline_ends_what_nobody_watches(client: Client, server: LiveServer) -> None:
    rollout = client.generate(
        [{"token_ids": [HANGS]}, {"prompt": "a"}],
        sampling={"max_tokens": 2},
        timeout_s=2.0,
        detach=True,
    )
    late, done = rollout.result(30).results
    assert late.error is not None and late.error.code == "deadline_exceeded" and done.choices
    eventually(lambda: not server.engine.running)


def test_an_id_stays_one_part_of_the_path(client: Client) -> None:
    with pytest.raises(ServerError) as refused:
        client.rollout("../weights?x#y").fetch()
    assert refused.value.status == 404 and "weights" in refused.value.message


def test_the_same_for_asyncio(server: LiveServer) -> None:
    async def run() -> None:
        async with AsyncClient(server.url, timeout_s=10) as client:
            rollout = await client.generate(ITEMS, sampling=FIELDS, detach=True)
            reply = await rollout.result(30)
            assert [result.id for result in reply.results] == ["b", "a"] and (
                await rollout.fetch()
            ).status == "done"
            assert rollout.id in [summary.id for summary in await client.rollouts()]
            await client.rollout(rollout.id).delete()
            keyed = await client.generate(ITEMS, sampling=FIELDS, idempotency_key="asyncio")
            assert keyed == await client.generate(ITEMS, sampling=FIELDS, idempotency_key="asyncio")

    asyncio.run(run())


# idempotency keys


def post(server: LiveServer, key: str | bytes | None = None, **body: Any) -> httpx.Response:
    headers = (
        [(b"idempotency-key", key.encode() if isinstance(key, str) else key)]
        if key is not None
        else []
    )
    return httpx.post(f"{server.url}/generate", json=QUICK | body, headers=headers, timeout=30)


def test_a_repeated_key_gets_the_same_reply_and_runs_once(server: LiveServer) -> None:
    first = post(server, "once")
    ran = len(server.engine.submitted)
    again = post(server, "once")
    assert (
        first.status_code == 200
        and first.content == again.content
        and len(server.engine.submitted) == ran
    )
    assert first.headers["x-rollout-id"] == again.headers["x-rollout-id"]
    assert (
        post(server, "another").json()["results"][0]["choices"][0]["seed"]
        != first.json()["results"][0]["choices"][0]["seed"]
    )
    fetched = httpx.get(f"{server.url}/rollouts/{first.headers['x-rollout-id']}").json()
    assert fetched["status"] == "done" and fetched["results"] == first.json()["results"]


def test_a_key_with_another_body_is_a_conflict(server: LiveServer) -> None:
    post(server, "bodies")
    response = post(server, "bodies", sampling={"max_tokens": 5})
    assert (response.status_code, response.json()["error"]["code"]) == (409, "conflict")
    assert post(server, "bodies").status_code == 200


def test_a_request_that_was_refused_leaves_its_key_free(server: LiveServer) -> None:
    assert post(server, "free", requests=[{"token_ids": [10**6]}]).status_code == 400
    assert post(server, "free").status_code == 200


def test_an_error_is_repeated_with_its_status(server: LiveServer) -> None:
    first, again = (post(server, "fails", requests=[{"token_ids": [FAILS]}]) for _ in range(2))
    assert first.status_code == again.status_code == 500 and first.content == again.content


def test_many_at_once_with_one_key_run_once(slow: LiveServer) -> None:
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
    assert (
        len(replies) == 12
        and len({reply.content for reply in replies}) == 1
        and len(slow.engine.submitted) == before + 1
    )


def test_a_keyed_request_goes_on_when_its_client_hangs_up(slow: LiveServer) -> None:
    aborted = len(slow.engine.aborted)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{slow.url}/generate",
            json=QUICK | {"sampling": {"max_tokens": 60}},
            headers={"idempotency-key": "left"},
            timeout=httpx.Timeout(30, read=0.1),
        )
    reply = post(slow, "left", sampling={"max_tokens": 60})
    assert (
        len(reply.json()["results"][0]["choices"][0]["token_ids"]) == 60
        and len(slow.engine.aborted) == aborted
    )


def test_a_detached_request_with_a_key_gives_the_same_id(server: LiveServer) -> None:
    first, again = (post(server, "detached", detach=True) for _ in range(2))
    assert (
        first.status_code == again.status_code == 202
        and first.json()["id"] == again.json()["id"] == first.headers["x-rollout-id"]
    )


# what hostile clients send


@pytest.mark.parametrize("key", ["", "a b", "a\tb", "é", "x" * 257, b"\xff\xfe"])
def test_a_bad_key_is_named(server: LiveServer, key: str | bytes) -> None:
    response = post(server, key.encode("latin-1") if isinstance(key, str) else key)
    assert response.status_code == 400 and "Idempotency-Key" in response.json()["error"]["message"]
    assert post(server, "~" * 256).status_code == 200


@pytest.mark.parametrize(
    ("key", "body"), [(None, {"detach": True}), ("k", {}), ("k", {"detach": True})]
)
def test_a_rollout_is_not_streamed(
    server: LiveServer, key: str | None, body: dict[str, Any]
) -> None:
    response = post(server, key, stream=True, **body)
    assert (
        response.status_code == 400
        and "leave one of the two out" in response.json()["error"]["message"]
    )


@pytest.mark.parametrize(
    "id",
    ["x", "..%2f..%2fetc%2fpasswd", "r-" + "0" * 32, "%00", "é" * 300, "lock", "*", "x" * 5000],
)
def test_an_id_is_looked_up_and_nothing_else(server: LiveServer, id: str) -> None:
    for method in ("GET", "DELETE"):
        response = httpx.request(method, f"{server.url}/rollouts/{id}")
        assert response.status_code == 404 and len(response.content) < 1000
    assert (server.directory / "rollouts" / "lock").exists()


@pytest.mark.parametrize("wait", ["-1", "61", "nan", "inf", "", "x", "1e999", "1" * 400])
def test_a_bad_wait_is_named(server: LiveServer, wait: str) -> None:
    id = post(server, detach=True).json()["id"]
    response = httpx.get(f"{server.url}/rollouts/{id}", params={"wait_s": wait})
    assert response.status_code == 400 and "wait_s" in response.json()["error"]["message"]


# bounds


def test_no_more_rollouts_are_kept_than_the_limit_and_fetched_ones_make_room(model: Path) -> None:
    with live_server(model, max_rollouts=2) as server:
        ids = [post(server, detach=True).json()["id"] for _ in range(2)]
        eventually(lambda: all(rollout.done_s for rollout in server.rollouts))
        full = post(server, detach=True)
        assert (full.status_code, full.json()["error"]["code"]) == (
            429,
            "queue_full",
        ) and "max_rollouts" in full.json()["error"]["message"]
        assert int(full.headers["retry-after"]) > 0
        httpx.get(f"{server.url}/rollouts/{ids[1]}")
        new = post(server, detach=True).json()["id"]
        kept = [rollout["id"] for rollout in httpx.get(f"{server.url}/rollouts").json()["rollouts"]]
        assert (
            kept == [ids[0], new]
            and len(list((server.directory / "rollouts").glob("*.journal"))) == 2
        )


def test_keyed_requests_that_were_answered_never_fill_the_limit(model: Path) -> None:
    with live_server(model, max_rollouts=3) as server:
        assert [post(server, f"k{i}").status_code for i in range(12)] == [200] * 12
        assert len(list(server.rollouts)) == 3


def test_finished_rollouts_go_after_their_time(model: Path) -> None:
    with live_server(model, rollout_ttl_s=3) as server:
        id = post(server, "brief", detach=True).json()["id"]
        assert (
            httpx.get(f"{server.url}/rollouts/{id}?wait_s=30", timeout=40).json()["status"]
            == "done"
        )
        eventually(lambda: httpx.get(f"{server.url}/rollouts/{id}").status_code == 404)
        assert (
            not list((server.directory / "rollouts").glob("*.journal"))
            and post(server, "brief", detach=True).json()["id"] != id
        )


def test_journals_over_their_limit_end_a_rollout_with_a_typed_error_and_give_the_room_back(
    model: Path,
) -> None:
    with live_server(model, max_rollout_mb=1, max_queue=20000, max_n=20000) as server:
        rollout = post(
            server,
            detach=True,
            requests=[{"prompt": "abc", "n": 2000}, {"id": "x", "prompt": "a"}],
            sampling={"max_tokens": 500},
        )
        reply = httpx.get(
            f"{server.url}/rollouts/{rollout.json()['id']}?wait_s=30", timeout=40
        ).json()
        errors = [result["error"] for result in reply["results"]]
        assert reply["status"] == "done" and {error["code"] for error in errors} == {
            "storage_failed"
        }
        assert "max_rollout_mb" in errors[0]["message"] and errors[0]["retryable"]
        eventually(lambda: len(server.client) == 0 and not server.engine.running)
        assert not list((server.directory / "rollouts").glob("*.journal"))
        assert (
            httpx.get(f"{server.url}/rollouts/{rollout.json()['id']}").json()["results"]
            == reply["results"]
        )
        assert post(server, "after").status_code == 200
        refused = post(server, detach=True, requests=[{"prompt": "a" * 500, "n": 20000}])
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "storage_failed")


def failing(after: int) -> Callable[[Journal, bytes], None]:
    real, left = Journal.append, [after]

    def append(journal: Journal, framed: bytes) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise StorageFailed("no space left on device")
        real(journal, framed)

    return append


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_disk_that_fills_up_never_hurts_the_server(
    server: LiveServer, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Journal, "append", failing(after))
    response = post(server, "disk", sampling={"max_tokens": 400})
    monkeypatch.undo()
    if after == 0:
        assert response.status_code == 507
    else:
        assert [result["error"]["code"] for result in response.json()["results"]] == [
            "storage_failed"
        ]
        httpx.delete(f"{server.url}/rollouts/{response.headers['x-rollout-id']}").raise_for_status()
    eventually(lambda: len(server.client) == 0)
    assert post(server, "disk").status_code == 200
    httpx.delete(
        f"{server.url}/rollouts/{post(server, 'disk').headers['x-rollout-id']}"
    ).raise_for_status()


def test_metrics_say_what_is_kept(model: Path) -> None:
    with live_server(model) as server, Client(server.url, timeout_s=30) as client:
        client.generate([{"prompt": "a"}], detach=True).result(30)
        client.generate([{"token_ids": [HANGS]}], detach=True)
        text = client.metrics()
        assert (
            'tlt_rollouts{status="running"} 1.0' in text
            and 'tlt_rollouts{status="done"} 1.0' in text
        )
        size = sum(
            path.stat().st_size for path in (server.directory / "rollouts").glob("*.journal")
        )
        assert f"tlt_rollout_bytes {float(size)}" in text


# the next engine


def test_the_next_engine_goes_on_and_only_with_what_asked_for_it(model: Path) -> None:
    with (
        live_server(model, engine={"step_s": 0.03, "per_step": 1}, **OFTEN) as server,
        Client(server.url, timeout_s=20) as client,
    ):
        rollout = client.generate(
            [{**item, "seed": 9} for item in ITEMS], sampling=FIELDS, detach=True
        )
        plain: list[Reply] = []
        thread = threading.Thread(
            target=lambda: plain.append(client.generate([{"token_ids": [HANGS]}]))
        )
        thread.start()
        for least in (3, 20):
            eventually(lambda least=least: rollout.fetch().progress.tokens > least)  # type: ignore[misc]
            die(server, least)
        thread.join(30)
        assert (
            plain[0].results[0].error is not None
            and plain[0].results[0].error.code == "engine_failed"
        )
        reply = rollout.result(30)
        assert all(request.generated for request in server.engine.submitted)
    with (
        live_server(model, engine={"per_step": 1}) as undisturbed,
        Client(undisturbed.url) as client,
    ):
        expected = client.generate([{**item, "seed": 9} for item in ITEMS], sampling=FIELDS)
    assert reply == expected  # also the figures: one token a step here


# the next server


def test_the_next_server_goes_on_with_what_was_written(model: Path, tmp_path: Path) -> None:
    """The first one stops in the middle, with some tokens, a stop string half seen, and one item
    done.
    """
    items = [
        {"id": "c", "prompt": "ab", "sampling": {"max_tokens": 3}},
        *({**item, "seed": 9} for item in ITEMS),
    ]
    with live_server(model) as undisturbed, Client(undisturbed.url) as client:
        expected = client.generate(items, sampling=FIELDS)
    with (
        live_server(model, engine={"step_s": 0.2, "per_step": 1}, state_dir=tmp_path) as first,
        Client(first.url) as client,
    ):
        rollout = client.generate(items, sampling=FIELDS, detach=True, idempotency_key="k")
        eventually(lambda: rollout.fetch().progress.tokens >= 13)
        keyed: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: keyed.append(
                httpx.get(f"{first.url}/rollouts/{rollout.id}", params={"wait_s": 60}, timeout=70)
            )
        )
        thread.start()
        await_waiter(first, rollout.id)
    thread.join(30)
    assert keyed[0].status_code == 503 and "state_dir" in keyed[0].json()["error"]["message"]
    with (
        live_server(model, engine={"step_s": 0.01, "per_step": 2}, state_dir=tmp_path) as second,
        Client(second.url) as client,
    ):
        again = client.generate(items, sampling=FIELDS, detach=True, idempotency_key="k")
        assert again.id == rollout.id
        reply = client.rollout(rollout.id).result(30)
        assert {request.id for request in second.engine.submitted} and all(
            request.generated for request in second.engine.submitted
        )
        for name, found in choices(reply).items():
            for mine, theirs in zip(found, choices(expected)[name], strict=True):
                assert (
                    mine.token_ids,
                    mine.text,
                    mine.logprobs,
                    mine.top_logprobs,
                    mine.prompt_logprobs,
                    mine.seed,
                ) == (
                    theirs.token_ids,
                    theirs.text,
                    theirs.logprobs,
                    theirs.top_logprobs,
                    theirs.prompt_logprobs,
                    theirs.seed,
                )
                assert (mine.finish_reason, mine.stop_reason) == (
                    theirs.finish_reason,
                    theirs.stop_reason,
                )
                assert mine.sd.steps > theirs.sd.steps, "figures cover both parts"
        assert (
            f"tlt_resumed_sequences_total {float(len(second.engine.submitted))}" in client.metrics()
        )
    with live_server(model, state_dir=tmp_path) as third, Client(third.url) as client:
        assert client.rollout(rollout.id).result(30) == reply and not third.engine.submitted
        client.rollout(rollout.id).delete()
        assert not list((tmp_path / "rollouts").glob("*.journal"))


def test_tokens_say_which_version_made_them_over_a_restart(model: Path, tmp_path: Path) -> None:
    with (
        live_server(model, engine={"step_s": 0.2, "per_step": 1}, state_dir=tmp_path) as first,
        Client(first.url) as client,
    ):
        rollout = client.generate([{"prompt": "abc"}], sampling={"max_tokens": 30}, detach=True)
        eventually(lambda: rollout.fetch().progress.tokens > 3)
    [path] = (tmp_path / "rollouts").glob("*.journal")
    said = past(path.read_bytes())
    assert said is not None
    cut = sum(len(output.token_ids) for output in said.outputs)
    with (
        live_server(
            model, engine={"weights": WeightState(target="v7")}, state_dir=tmp_path
        ) as second,
        Client(second.url) as client,
    ):
        [choice] = client.rollout(rollout.id).result(30).results[0].choices
        assert [(span.version, span.start, span.end) for span in choice.weight_versions] == [
            ("v0", 0, cut),
            ("v7", cut, 30),
        ]


def test_a_torn_journal_is_cut_and_one_without_a_header_is_gone(
    model: Path, tmp_path: Path
) -> None:
    with (
        live_server(model, engine={"step_s": 0.2, "per_step": 1}, state_dir=tmp_path) as first,
        Client(first.url) as client,
    ):
        rollout = client.generate(
            [{"prompt": "abc", "n": 2}], sampling={"max_tokens": 20}, detach=True
        )
        eventually(lambda: rollout.fetch().progress.tokens > 8)
    path = tmp_path / "rollouts" / f"{rollout.id}.journal"
    os.truncate(path, path.stat().st_size - 5)
    (tmp_path / "rollouts" / "r-1.journal").write_bytes(path.read_bytes()[:20])
    with live_server(model, state_dir=tmp_path) as second, Client(second.url) as client:
        assert [summary.id for summary in client.rollouts()] == [rollout.id]
        assert [
            choice.text for choice in client.rollout(rollout.id).result(30).results[0].choices
        ] == ["abcabcabcabcabcabcab"] * 2


def test_a_deadline_goes_on_while_no_server_runs(model: Path, tmp_path: Path) -> None:
    with live_server(model, state_dir=tmp_path) as first, Client(first.url) as client:
        rollout = client.generate([{"token_ids": [HANGS]}], timeout_s=4, detach=True)
    time.sleep(4)
    with live_server(model, state_dir=tmp_path) as second, Client(second.url) as client:
        started = time.monotonic()
        [result] = client.rollout(rollout.id).result(30).results
        assert (
            result.error is not None
            and result.error.code == "deadline_exceeded"
            and time.monotonic() - started < 3.5
        )


def test_a_state_directory_belongs_to_one_server(model: Path, tmp_path: Path) -> None:
    with live_server(model, state_dir=tmp_path) as first:
        second = Rollouts(
            tmp_path / "rollouts", first.config, Metrics(), first.rollouts._generations
        )
        with pytest.raises(StartupError, match="in use by another server"):
            asyncio.run(second.open())


def test_what_was_begun_with_another_model_is_not_continued(model: Path, tmp_path: Path) -> None:
    with live_server(model, state_dir=tmp_path / "state") as first, Client(first.url) as client:
        rollout = client.generate([{"token_ids": [HANGS]}], detach=True)
    other = tmp_path / "other"
    other.mkdir()
    with (
        live_server(write_model(other), state_dir=tmp_path / "state") as second,
        Client(second.url) as client,
    ):
        [result] = client.rollout(rollout.id).result(30).results
        assert (
            result.error is not None
            and result.error.code == "conflict"
            and str(model) in result.error.message
        )
        assert not second.engine.submitted


def test_what_was_accepted_goes_on_under_smaller_bounds_and_a_copied_file_is_put_aside(
    model: Path, tmp_path: Path
) -> None:
    with (
        live_server(model, engine={"step_s": 0.2, "per_step": 1}, state_dir=tmp_path) as first,
        Client(first.url) as client,
    ):
        rollouts = [
            client.generate([{"prompt": "abc", "n": 4}], sampling={"max_tokens": 20}, detach=True)
            for _ in range(2)
        ]
        eventually(lambda: all(rollout.fetch().progress.tokens > 8 for rollout in rollouts))
    path = tmp_path / "rollouts" / f"{rollouts[0].id}.journal"
    path.with_name("copy.journal").write_bytes(path.read_bytes())
    with (
        live_server(model, state_dir=tmp_path, max_queue=1) as second,
        Client(second.url) as client,
    ):
        for rollout in rollouts:
            assert [
                choice.text for choice in client.rollout(rollout.id).result(30).results[0].choices
            ] == ["abcabcabcabcabcabcab"] * 4
        assert len(client.rollouts()) == 2 and path.with_name("copy.journal.damaged").exists()


def test_a_rollout_of_which_only_the_end_is_not_written_is_done(
    model: Path, tmp_path: Path
) -> None:
    with live_server(model, state_dir=tmp_path) as first, Client(first.url) as client:
        rollout = client.generate([{"prompt": "abc"}], sampling={"max_tokens": 5}, detach=True)
        reply = rollout.result(30)
    path = tmp_path / "rollouts" / f"{rollout.id}.journal"
    os.truncate(path, path.stat().st_size - 1)
    with live_server(model, state_dir=tmp_path) as second, Client(second.url) as client:
        assert (
            client.rollout(rollout.id).result(30).results == reply.results
            and not second.engine.submitted
        )


def test_a_deadline_ends_a_rollout_that_no_engine_can_take_up(model: Path, tmp_path: Path) -> None:
    with (
        live_server(model, engine={"step_s": 0.05, "per_step": 1}, state_dir=tmp_path) as first,
        Client(first.url) as client,
    ):
        client.update_weights("p", "v1")
        rollout = client.generate(
            [{"prompt": "abc"}], sampling={"max_tokens": 200}, timeout_s=3, detach=True
        )
        eventually(lambda: rollout.fetch().progress.tokens > 3)
    with (
        live_server(model, engine={"lost": {"target": "v1 is gone"}}, state_dir=tmp_path) as second,
        Client(second.url) as client,
    ):
        [result] = client.rollout(rollout.id).result(30).results
        assert (
            result.error is not None
            and result.error.code == "deadline_exceeded"
            and not second.engine.submitted
        )


def test_outputs_that_another_version_has_written_are_a_typed_error_when_they_are_fetched(
    model: Path, tmp_path: Path
) -> None:
    with live_server(model, state_dir=tmp_path) as server, Client(server.url) as client:
        rollout = client.generate([{"prompt": "ab"}], sampling={"max_tokens": 4}, detach=True)
        assert rollout.result(30).results
        path = tmp_path / "rollouts" / f"{rollout.id}.journal"
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:4], "little")
        path.write_bytes(data[:end] + framed(b"\x81\xa4type\xa5grown") + data[end:])
    with live_server(model, state_dir=tmp_path) as server, Client(server.url) as client:
        assert [one.status for one in client.rollouts()] == ["done"]
        refused = httpx.get(f"{server.url}/rollouts/{rollout.id}")
        assert refused.status_code == 507 and "another version" in refused.text


def framed(payload: bytes) -> bytes:
    length = len(payload).to_bytes(4, "little")
    return length + zlib.crc32(payload, zlib.crc32(length)).to_bytes(4, "little") + payload
