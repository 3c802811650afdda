"""Epochs of the engine: restarts, open requests, refusals by name, lost versions."""

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.frontend.fake_engine import DIES, HANGS
from tests.frontend.live_server import LiveServer, live_server, server_and_client, serving
from tests.waiting import meanwhile, until
from tlt_client import Client, ServerError
from tlt_server.frontend.link.submission import Submission
from tlt_server.frontend.link.supervisor import Backoff
from tlt_server.wire.commands import SetPolicy
from tlt_server.wire.records import GenerateRequest, Sampling, StepOutput

OFTEN = {"max_restarts": 100, "restart_window_s": 1.0}


server = serving(scope="function", **OFTEN)


def die(server: LiveServer, prompt: int = 65) -> None:
    """Kill the engine by a request, and wait until the next epoch is ready."""
    epoch, said = server.engine, len(server.said.getvalue())
    with Client(server.url, timeout_s=30) as client:
        [result] = client.generate([{"token_ids": [prompt, DIES]}]).results
    assert result.error is not None
    assert (result.error.code, result.error.retryable) == ("engine_failed", True)
    until(
        lambda: (
            server.engine is not epoch
            and not server.client.replica.failure
            and "the engine is back" in server.said.getvalue()[said:]
        )
    )


class Collected:
    """A submission made in the server's loop, and what came of it."""

    def __init__(
        self,
        server: LiveServer,
        *requests: GenerateRequest,
        resumes: bool = True,
        deadline_s: float | None = None,
    ) -> None:
        self.outputs: list[StepOutput] = []
        self.requests = {request.id: request for request in requests}
        self.submission: Submission

        async def collect() -> None:
            async for outputs, _ in self.submission.slices(lambda output: 1, 1):
                self.outputs += outputs

        def submit() -> None:
            self.submission = server.client.submit(
                list(requests), deadline_s=deadline_s, resumes=resumes
            )
            self.task = asyncio.ensure_future(collect())

        server.call(submit)

    def ends(self) -> dict[str, tuple[str | None, str | None]]:
        """id -> finish reason and error code; asserts one end each."""
        until(lambda: self.task.done())
        ends = [output for output in self.outputs if output.finish_reason is not None]
        assert len(ends) == len(self.requests) == len({output.id for output in ends})
        return {
            output.id: (output.finish_reason, output.error[0] if output.error else None)
            for output in ends
        }


def times_sent(server: LiveServer, id: str) -> int:
    """Count how often a sequence was sent to an engine."""
    return sum(each.id == id for engine in server.engines for each in engine.submitted)


def request(
    id: str, token_ids: tuple[int, ...] = (65,), max_tokens: int = 5, **fields: Any
) -> GenerateRequest:
    return GenerateRequest(
        id=id, token_ids=list(token_ids), sampling=Sampling(max_tokens=max_tokens), seed=1, **fields
    )


def test_dead_engine_is_restarted_and_open_requests_end_typed(server: LiveServer) -> None:
    with Client(server.url, timeout_s=30) as client:
        waiting = meanwhile(
            lambda: client.generate([{"token_ids": [HANGS]}, {"token_ids": [HANGS], "n": 2}])
        )
        until(lambda: len(server.client) == 3)
        die(server)
        for result in waiting.result(30).results:
            assert result.error is not None and result.error.code == "engine_failed"
            assert "status 7" in result.error.message
        assert client.generate([{"prompt": "ab"}], sampling={"max_tokens": 3}).results[0].choices
        metrics = client.metrics()
    for line in (
        'tlt_engine_restarts_total{reason="exited"} 1.0',
        'tlt_engine_restarts_total{reason="hung"} 0.0',
        "tlt_engine_up 1.0",
        "tlt_open_sequences 0.0",
    ):
        assert line in metrics.splitlines()
    assert not (server.directory / "1").exists()
    assert (server.directory / "2").stat().st_mode & 0o777 == 0o700
    died, back = server.said.getvalue().splitlines()[-3::2]
    assert "see its messages above" in died and "messages above" not in str(
        waiting.result(30).results
    )  # clients do not see standard error
    assert "status 7" in died and "restarting now" in died and "the engine is back" in back
    assert "weights v0" in back


def test_during_a_restart_the_server_is_alive_but_not_ready(model: Path) -> None:
    with live_server(model, **OFTEN) as server:
        server.call(server.may_launch.clear)
        with Client(server.url, timeout_s=30) as client:
            client.generate([{"token_ids": [DIES]}])
        for path, status in (
            ("/livez", 200),
            ("/ping", 200),
            ("/readyz", 503),
            ("/startupz", 200),
            ("/strategy", 503),
            ("/weights", 503),
        ):
            response = httpx.get(server.url + path)
            assert response.status_code == status
            if status == 503:
                assert "is being restarted" in response.text
                assert int(response.headers["retry-after"]) >= 1
        response = httpx.post(f"{server.url}/generate", json={"requests": [{"prompt": "a"}]})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
        assert "tlt_engine_up 0.0" in httpx.get(f"{server.url}/metrics").text
        assert not httpx.get(f"{server.url}/server_info").json()["ready"]
        assert '"ready":false' in httpx.get(f"{server.url}/events").text
        server.call(server.may_launch.set)
        until(lambda: httpx.get(f"{server.url}/readyz").status_code == 200)


def test_restart_time_includes_process_launch_and_is_logged(model: Path) -> None:
    with server_and_client(model, **OFTEN) as (server, client):
        server.call(server.may_launch.clear)
        client.generate([{"token_ids": [DIES]}])
        time.sleep(1.1)  # as library imports do, of which the engine's phases know nothing
        server.call(server.may_launch.set)
        until(lambda: "the engine is back" in server.said.getvalue())
        (back,) = re.findall(r"the engine is back after ([\d.]+) s", server.said.getvalue())
        assert 1.1 <= float(back) < 30
        server.call(server.may_launch.clear)
        client.generate([{"token_ids": [66, DIES]}])
        assert 2 <= int(httpx.get(f"{server.url}/readyz").headers["retry-after"]) < 31
        server.call(server.may_launch.set)
        until(lambda: not server.client.replica.failure)


def test_resumable_requests_are_resubmitted_in_order_before_new(server: LiveServer) -> None:
    first = Collected(
        server, request("a", (65, 66, 67), 10**6), request("b", (66,), 10**6), request("short")
    )
    plain = Collected(server, request("c", (HANGS,)), resumes=False)
    second = Collected(server, request("d", (67,), 10**6))
    until(lambda: "short" not in first.submission.open and len(server.engine.running) == 4)
    until(lambda: {"a", "b"} <= {output.id for output in first.outputs})
    server.run(server.client.set_policy(SetPolicy("off")))
    server.call(server.may_launch.clear)
    server.call(lambda: setattr(server.engine, "dies", True))
    assert plain.ends() == {"c": ("error", "engine_failed")}
    server.call(server.may_launch.set)
    until(lambda: not server.client.replica.failure)
    new = Collected(server, request("new"))
    assert new.ends() == {"new": ("length", None)}
    epoch = server.engine
    assert [r.id for r in epoch.submitted] == ["a", "b", "d", "new"]
    assert epoch.policies == [SetPolicy("off")]
    server.call(second.submission.close)
    server.call(lambda: server.client.abort(["a", "b"]))
    assert first.ends() == {"a": ("abort", None), "b": ("abort", None), "short": ("length", None)}
    tokens = [token for o in first.outputs if o.id == "a" for token in o.token_ids]
    resumed = epoch.submitted[0].generated
    assert 0 < len(resumed) < len(tokens) and tokens[: len(resumed)] == resumed
    assert tokens == [65 + i % 3 for i in range(len(tokens))]
    until(lambda: len(server.client) == 0 and not epoch.running)


def test_deadlines_and_aborts_work_without_an_engine(model: Path) -> None:
    with live_server(model, **OFTEN) as server:
        server.call(server.may_launch.clear)
        late = Collected(server, request("late", (HANGS,)), deadline_s=time.monotonic() + 0.4)
        aborted = Collected(server, request("aborted", (HANGS,)))
        stays = Collected(server, request("stays", (HANGS,)))
        stopped = Collected(server, request("stopped", (HANGS,)))
        closed = Collected(server, request("closed", (HANGS,)))
        until(lambda: len(server.engine.submitted) == 5)
        server.call(
            lambda: (server.client.abort(["stopped"], "stop"), setattr(server.engine, "dies", True))
        )
        until(lambda: server.client.replica.failure)
        assert stopped.ends() == {"stopped": ("stop", None)}
        server.call(lambda: server.client.abort(["aborted"]))
        assert aborted.ends() == {"aborted": ("abort", None)}
        server.call(closed.submission.close)
        assert late.ends() == {"late": ("error", "deadline_exceeded")}
        server.call(server.may_launch.set)
        until(lambda: not server.client.replica.failure)
        until(lambda: [r.id for r in server.engine.submitted] == ["stays"])
        server.call(stays.submission.close)


def test_a_request_in_flight_at_two_crashes_is_refused_by_name(server: LiveServer) -> None:
    for _ in range(2):
        die(server)
    epoch = server.engine
    batch = {
        "requests": [{"id": "killer", "token_ids": [65, DIES]}, {"id": "fine", "prompt": "ab"}],
        "sampling": {"max_tokens": 256},
    }
    for stream in (False, True):
        response = httpx.post(f"{server.url}/generate", json=batch | {"stream": stream})
        assert response.status_code == 200
        assert "'killer' was running when two engines crashed" in response.text
        assert '"poisoned"' in response.text
    killer, fine = httpx.post(f"{server.url}/generate", json=batch).json()["results"]
    assert killer["error"]["code"] == "poisoned" and not killer["error"]["retryable"]
    assert "leave it out" in killer["error"]["message"]
    assert len(fine["choices"][0]["token_ids"]) == 256
    alone = httpx.post(f"{server.url}/generate", json={"requests": batch["requests"][:1]})
    assert alone.status_code == 422
    assert server.engine is epoch and len(server.client) == 0
    assert not any(DIES in request.token_ids for request in epoch.submitted)


def test_resumed_request_that_crashes_twice_is_not_retried(server: LiveServer) -> None:
    bystander = Collected(server, request("b", (66,), 10**6))
    until(lambda: bystander.outputs)
    killer = Collected(server, request("k", (65, DIES)))
    assert killer.ends() == {"k": ("error", "poisoned")} and times_sent(server, "k") == 2
    server.call(lambda: server.client.abort(["b"]))
    assert bystander.ends() == {"b": ("abort", None)}


def test_crash_suspects_run_one_by_one_until_the_killer_is_found(server: LiveServer) -> None:
    batch = Collected(
        server, *(request(f"b{i}", (66 + i,), 10**6) for i in range(5)), request("k", (65, DIES))
    )
    waiting = Collected(server, request("w", (80,), 10**6))
    until(
        lambda: (
            {output.id for output in batch.outputs if output.token_ids}
            == {f"b{i}" for i in range(5)}
        )
    )
    until(lambda: times_sent(server, "k") == 2)
    assert all(not output.error for output in batch.outputs if output.id != "k")
    new = Collected(server, request("new"))
    assert new.ends() == {"new": ("length", None)}
    server.call(lambda: server.client.abort([f"b{i}" for i in range(5)]))
    ends = batch.ends()
    assert ends.pop("k") == ("error", "poisoned") and set(ends.values()) == {("abort", None)}
    server.call(waiting.submission.close)


def test_prompt_sent_next_to_a_crashing_one_stays_allowed(server: LiveServer) -> None:
    def together(attempt: int) -> dict[str, tuple[str | None, str | None]]:
        until(lambda: not server.client.replica.failure)
        return Collected(
            server,
            request(f"copy{attempt}", (70,), 300),
            request(f"killer{attempt}", (65, DIES)),
            resumes=False,
        ).ends()

    for attempt in range(2):  # both together, then one after the other: by now the killer is known
        assert together(attempt) == {
            f"copy{attempt}": ("error", "engine_failed"),
            f"killer{attempt}": ("error", "engine_failed"),
        }
    assert together(2) == {"copy2": ("length", None), "killer2": ("error", "poisoned")}
    assert Collected(server, request("victim", (70,), 300)).ends() == {"victim": ("length", None)}


def test_abandoned_crash_trial_makes_room_for_the_next(server: LiveServer) -> None:
    hanging = Collected(server, request("h", (HANGS, 65)))
    behind = Collected(server, request("n", (66,), 10**6))
    until(lambda: behind.outputs)
    die(server)
    until(lambda: [r.id for r in server.engine.submitted] == ["h"])
    server.call(hanging.submission.close)
    until(lambda: "n" in server.engine.running)
    server.call(behind.submission.close)
    until(lambda: not server.engine.running and len(server.client) == 0)


def test_changed_version_after_restart_is_unserved_until_a_push(server: LiveServer) -> None:
    with Client(server.url, timeout_s=30) as client:
        client.update_weights("p", "v1")
        waiting = Collected(server, request("w", (66,), 10**6))
        die(server)
        until(lambda: server.client.versions.lost)
        for response in (
            httpx.get(f"{server.url}/readyz"),
            httpx.post(f"{server.url}/generate", json={"requests": [{"prompt": "a"}]}),
            httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}),
        ):
            assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
            assert "'v1' of the target is lost" in response.text
            assert "POST /update_weights" in response.text
        assert not client.server_info()["ready"] and client.weights()["target"] == "v0"
        assert httpx.get(f"{server.url}/strategy").status_code == 200
        assert "nothing is generated" in server.said.getvalue()
        die_again = server.engine
        server.call(lambda: setattr(die_again, "dies", True))
        until(lambda: server.engine is not die_again and not server.client.replica.failure)
        assert not server.engine.submitted
        client.update_weights("p", "v2")
        assert client.generate([{"prompt": "ab"}], sampling={"max_tokens": 3}).results[0].choices
        assert [r.id for r in server.engine.submitted][0] == "w"
        server.call(waiting.submission.close)


def test_version_lost_by_the_first_epoch_is_not_served(model: Path) -> None:
    with live_server(
        model,
        engine={
            "lost": {"target": "the committed weight version 'v7' of the target is lost: truncated"}
        },
    ) as server:
        assert "v7" in httpx.get(f"{server.url}/readyz").json()["error"]["message"]
        with Client(server.url, timeout_s=30) as client:
            client.update_weights("p", "v8")
            assert client.is_ready()


def test_aborted_sequence_of_a_lost_version_ends_in_the_frontend(server: LiveServer) -> None:
    with Client(server.url, timeout_s=30) as client:
        client.update_weights("p", "v1")
    waiting = Collected(server, request("w", (66,), 10**6))
    die(server)
    server.call(lambda: server.client.abort(["w"]))
    assert waiting.ends() == {"w": ("abort", None)}


@pytest.mark.parametrize(
    ("restarts", "deaths", "delays"),
    [
        (0, [0], [None]),
        (3, [0, 1, 2, 3], [0.0, 0.5, 1.0, None]),
        (9, [0, 1, 2, 3, 4, 5, 6, 7, 8], [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]),
        (2, [0, 10, 20, 30], [0.0, 0.0, 0.0, 0.0]),
        (2, [0, 1, 12, 13, 14], [0.0, 0.5, 0.0, 0.5, None]),
    ],
)
def test_restart_delay_doubles_until_max_restarts(
    restarts: int, deaths: list[float], delays: list[float | None]
) -> None:
    backoff = Backoff(restarts, window_s=10.0)
    assert [backoff.death(at_s) for at_s in deaths] == delays


def test_only_the_key_that_crashes_the_engine_is_delayed(model: Path) -> None:
    with (
        live_server(
            model, keys="a scopes=data name=a\nb scopes=data name=b\n", max_restarts=2
        ) as server,
        Client(server.url, api_key="a", timeout_s=30) as bad,
        Client(server.url, api_key="b", timeout_s=30) as good,
    ):
        bystander = good.generate([{"token_ids": [HANGS]}], detach=True)
        until(lambda: len(server.engine.running) == 1)
        for epoch in (2, 3, 4):  # at the first death both keys' requests run
            bad.generate([{"token_ids": [70 + epoch, DIES]}])
            until(lambda n=epoch: len(server.engines) == n and not server.client.replica.failure)
            server.call(lambda: server.client.abort([*server.client.open_ids]))
            bystander.result(30)
        for prompt in range(80, 90):
            with pytest.raises(ServerError) as caught:
                bad.generate([{"token_ids": [70 + prompt, DIES]}])
            error = caught.value
            assert (error.status, error.code, error.retryable) == (503, "unavailable", True)
            assert error.retry_after_s and 1 <= error.retry_after_s <= 15 and "rests" in str(error)
        [result] = good.generate([{"token_ids": [65], "sampling": {"max_tokens": 3}}]).results
        assert result.error is None and len(server.engines) == 4


def test_a_delayed_frontend_does_not_blame_its_engine(model: Path) -> None:
    with live_server(model, hang_timeout_s=2.0, max_restarts=0) as server:
        for _ in range(2):
            server._loop.call_soon_threadsafe(time.sleep, 2.5)
            time.sleep(2.7)
        assert not server.client.replica.failure
        server.call(lambda: setattr(server.engine, "deaf", True))
        until(lambda: "hang_timeout_s" in server.client.replica.failure)
