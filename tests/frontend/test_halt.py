"""Pause, sleep and abort by either dialect while requests run: which end, wait or are refused; and
the commands a new engine receives.
"""

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.frontend.fake_engine import DIES, HANGS
from tests.frontend.live_server import LiveServer, live_server
from tests.waiting import until
from tlt_server.wire.commands import ClearCache, Pause, Resume, Sleep, WakeUp

LONG = {
    "input_ids": [65, 66, 67],
    "rid": "long",
    "sampling_params": {"max_new_tokens": 400},
    "return_logprob": True,
}


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[LiveServer]:
    slow = {"step_s": 0.01, "per_step": 1}
    with live_server(model, engine=slow, max_restarts=100, restart_window_s=1.0) as running:
        yield running


@pytest.fixture
def server(running: LiveServer) -> LiveServer:
    """Return the file's server awake and idle, whose engine has recorded no command."""
    engine = running.engine
    engine.deaf = False
    for path in ("/resume", "/wake_up", "/abort_requests"):
        assert post(running, path).status_code == 200
    until(lambda: not len(running.client) and not engine.running)
    for recorded in (engine.controls, engine.weight_commands, engine.submitted, engine.aborted):
        recorded.clear()
    return running


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def post(server: LiveServer, path: str, body: object = None) -> httpx.Response:
    return httpx.post(
        f"{server.url}{path}", content=json.dumps(body) if body is not None else b"", timeout=60
    )


def begun(
    server: LiveServer, pool: ThreadPoolExecutor, body: object = LONG
) -> Future[httpx.Response]:
    asked = pool.submit(post, server, "/generate", body)
    until(lambda: any(running.sent > 2 for running in list(server.engine.running.values())))
    return asked


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause_generation", {}),
        ("/pause?mode=abort", None),
        ("/abort_request", {"abort_all": True}),
        ("/abort_request", {"rid": "long"}),
        ("/abort_requests", None),
        ("/abort_requests", {"request_ids": ["long"]}),
        ("/sleep", None),
        ("/engine/pause", {"in_flight": "abort"}),
        ("/engine/sleep", {"in_flight": "abort"}),
        ("/engine/abort", {"ids": ["long"]}),
        ("/engine/abort", {"all": True}),
    ],
)
def test_aborted_requests_return_their_tokens(
    path: str, body: object, server: LiveServer, pool: ThreadPoolExecutor
) -> None:
    asked = begun(server, pool)
    assert post(server, path, body).status_code == 200
    reply = asked.result(30).json()
    meta = reply["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert 2 < meta["completion_tokens"] == len(reply["output_ids"]) < 400
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
    assert len(server.client) == 0
    assert len(server.call(lambda: server.client.open_ids)) == 0


def test_only_the_request_named_is_aborted(server: LiveServer, pool: ThreadPoolExecutor) -> None:
    first = begun(server, pool)
    second = begun(server, pool, LONG | {"rid": "other", "sampling_params": {"max_new_tokens": 60}})
    post(server, "/abort_request", {"rid": "long"})
    assert first.result(30).json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert second.result(30).json()["meta_info"]["finish_reason"] == {
        "type": "length",
        "length": 60,
    }
    assert post(server, "/abort_request", {"rid": "long"}).status_code == 200, (
        "it has ended already"
    )
    assert post(server, "/abort_request", {}).status_code == 400


@pytest.mark.parametrize(
    ("pause", "body", "resume"),
    [
        ("/pause_generation", {}, "/continue_generation"),
        ("/pause?mode=keep", None, "/resume"),
        ("/engine/pause", None, "/engine/resume"),
    ],
)
def test_requests_wait_in_an_accepting_pause(
    pause: str, body: object, resume: str, server: LiveServer, pool: ThreadPoolExecutor
) -> None:
    assert post(server, pause, body).status_code == 200
    asked = pool.submit(
        post, server, "/generate", {"input_ids": [65], "sampling_params": {"max_new_tokens": 2}}
    )
    until(lambda: len(server.engine.running) == 1)
    time.sleep(0.1)
    assert not asked.done() and httpx.get(f"{server.url}/readyz").status_code == 200
    assert post(server, resume).status_code == 200
    assert asked.result(30).json()["output_ids"] == [65, 65]


def test_waiting_pause_refuses_requests_and_answers_at_the_end(
    server: LiveServer, pool: ThreadPoolExecutor
) -> None:
    asked = begun(server, pool, LONG | {"sampling_params": {"max_new_tokens": 200}})
    paused = pool.submit(post, server, "/pause?mode=wait")
    until(lambda: httpx.get(f"{server.url}/is_paused").json()["is_paused"])
    refused = post(server, "/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert refused.status_code == 503 and "POST /engine/resume" in refused.text
    assert int(refused.headers["retry-after"]) >= 1
    assert not paused.done(), "it waits for what runs"
    assert asked.result(30).json()["meta_info"]["finish_reason"]["type"] == "length"
    assert paused.result(30).json() == {"status": "paused"}
    assert post(server, "/resume").status_code == 200
    assert post(server, "/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("path", "said", "back"),
    [
        ("/pause?mode=wait", "/is_paused", "/resume"),
        ("/sleep?mode=wait&level=2", "/is_sleeping", "/wake_up"),
    ],
)
def test_pause_or_sleep_of_a_departed_client_is_still_done(
    path: str, said: str, back: str, server: LiveServer, pool: ThreadPoolExecutor
) -> None:
    asked = begun(server, pool, LONG | {"sampling_params": {"max_new_tokens": 200}})
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}{path}", timeout=httpx.Timeout(30, read=0.05))
    until(lambda: httpx.get(f"{server.url}{said}").json() == {said[1:]: True})
    assert post(server, "/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 503
    assert asked.result(30).json()["meta_info"]["finish_reason"]["type"] == "length", (
        "what runs has ended first"
    )
    until(lambda: server.engine.paused or bool(server.engine.asleep))
    assert httpx.get(f"{server.url}{said}").json() == {said[1:]: True}
    assert post(server, back).status_code == 200
    assert post(server, "/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    "said", ["true", "True", "TRUE", "1", "yes", "on", "false", "False", "0", "no", "Off"]
)
def test_boolean_parameters_accept_every_common_spelling(said: str, server: LiveServer) -> None:
    assert post(server, f"/pause?mode=keep&clear_cache={said}").json() == {"status": "paused"}
    assert post(server, "/resume").status_code == 200


def test_ambiguous_boolean_parameter_is_refused(server: LiveServer) -> None:
    refused = post(server, "/pause?clear_cache=maybe")
    assert refused.status_code == 400
    assert "clear_cache is 'maybe'; it must be one of true, 1, yes" in refused.text


def test_native_pause_replies_show_the_current_state(
    server: LiveServer, pool: ThreadPoolExecutor
) -> None:
    def state(path: str, body: object = None) -> tuple[bool, str, list[str]]:
        reply = post(server, f"/engine/{path}", body).json()
        return reply["paused"], reply["new_requests"], reply["asleep"]

    assert state("pause") == (True, "wait", [])
    assert state("pause", {"new_requests": "refuse"}) == (True, "refuse", [])
    assert state("sleep", {"memory": ["weights"]}) == (True, "refuse", ["weights"])
    assert state("sleep") == (True, "refuse", ["kv_cache", "weights"])
    assert state("resume") == (False, "refuse", ["kv_cache", "weights"])
    assert state("wake", {"memory": ["kv_cache"]}) == (False, "refuse", ["weights"])
    assert state("wake") == state("clear_cache") == (False, "run", [])
    asked = begun(server, pool)
    held = post(server, "/engine/clear_cache", {"unless_held": True})
    assert held.status_code == 409 and held.json()["error"]["code"] == "conflict"
    assert state("clear_cache") == (False, "run", []), "what runs keeps its KV"
    assert post(server, "/engine/abort", {"ids": ["long", "ended"]}).json() == {"sequences": 1}
    assert asked.result(30).json()["meta_info"]["finish_reason"]["type"] == "abort"


def test_native_control_calls_reach_the_engine_as_its_commands(server: LiveServer) -> None:
    for path, body in (
        ("pause", {"in_flight": "recompute", "clear_cache": True}),
        ("sleep", {"memory": ["kv_cache"], "in_flight": "drain"}),
        ("wake", {"memory": ["kv_cache"]}),
        ("resume", {}),
        ("clear_cache", {"unless_held": True}),
    ):
        assert post(server, f"/engine/{path}", body).status_code == 200
    pause, sleep, wake, resume, clear = server.engine.controls
    assert pause == Pause(pause.id, "recompute", clear_cache=True)
    assert sleep == Sleep(sleep.id, ["kv_cache"], "drain")
    assert wake == WakeUp(wake.id, ["kv_cache"]) and resume == Resume(resume.id)
    assert clear == ClearCache(clear.id, unless_held=True)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (
            "pause",
            {"in_flight": "keep"},
            "in_flight is 'keep'; it must be 'continue', 'recompute', 'abort' or 'drain'",
        ),
        ("pause", {"mode": "abort"}, "unknown field mode"),
        (
            "sleep",
            {"in_flight": "continue"},
            "in_flight is 'continue'; it must be 'recompute', 'abort' or 'drain'",
        ),
        (
            "wake",
            {"memory": ["graphs"]},
            "memory[0] is 'graphs'; it must be 'weights' or 'kv_cache'",
        ),
        ("abort", {}, "ids is absent and so is all; give exactly one of them"),
        ("abort", {"ids": ["a"], "all": True}, "ids is given and so is all; give exactly one"),
        ("abort", {"all": False}, "all is False; it must be True"),
    ],
)
def test_malformed_native_control_call_is_refused_by_field(
    path: str, body: object, said: str, server: LiveServer
) -> None:
    refused = post(server, f"/engine/{path}", body)
    assert refused.status_code == 400 and said in refused.json()["error"]["message"], refused.text
    assert not server.engine.controls and not server.engine.aborted


def test_a_cache_is_not_flushed_while_requests_run(
    server: LiveServer, pool: ThreadPoolExecutor
) -> None:
    asked = begun(server, pool)
    for method in ("GET", "POST"):
        assert httpx.request(method, f"{server.url}/flush_cache").status_code == 400
    post(server, "/abort_request", {"abort_all": True})
    asked.result(30)
    assert httpx.get(f"{server.url}/flush_cache").status_code == 200


def test_restarted_engine_receives_the_pause_and_the_sleep(
    server: LiveServer, pool: ThreadPoolExecutor
) -> None:
    post(server, "/pause?mode=keep")
    killed = pool.submit(post, server, "/generate", {"input_ids": [DIES]})
    first = server.engine
    assert killed.result(30).status_code == 500
    until(lambda: server.engine is not first and server.engine.paused)
    assert [type(command) for command in server.engine.controls] == [Pause]
    post(server, "/resume")
    post(server, "/sleep?level=2")
    second = server.engine
    second.dies = True
    until(lambda: server.engine is not second and bool(server.engine.controls))
    [told] = server.engine.controls
    assert isinstance(told, Sleep) and told.memory == ["kv_cache", "weights"]
    assert httpx.get(f"{server.url}/is_sleeping").json() == {"is_sleeping": True}


def test_command_that_kills_the_engine_changes_no_state(
    server: LiveServer, pool: ThreadPoolExecutor
) -> None:
    hung = pool.submit(post, server, "/generate", {"input_ids": [HANGS]})
    until(lambda: len(server.engine.running) == 1)
    paused = pool.submit(post, server, "/pause?mode=wait")
    until(lambda: bool(server.engine.draining))
    server.engine.dies = True
    assert paused.result(30).status_code == 500 and hung.result(30).status_code == 500
    until(lambda: httpx.get(f"{server.url}/readyz").status_code == 200)
    assert httpx.get(f"{server.url}/is_paused").json() == {"is_paused": False}


def test_generate_text_is_trimmed_as_requested(server: LiveServer) -> None:
    def text(**params: object) -> str:
        return post(
            server,
            "/generate",
            {"text": "abcdef", "sampling_params": {"max_new_tokens": 6} | params},
        ).json()["text"]

    whole = text()
    assert len(whole) > 3
    stop = whole[2]
    assert text(stop=[stop]) == whole[:2] and text(stop=[stop], no_stop_trim=True) == whole[:3]
    assert text(stop=[stop], skip_special_tokens=False) == whole[:2]


@pytest.mark.parametrize("rows", ["%C2%B2", "%D9%A3", "9" * 5000, "-1", "0", "x"])
def test_invalid_numbers_of_rows_are_refused(rows: str, server: LiveServer) -> None:
    refused = httpx.get(
        f"{server.url}/get_weights_by_name?name=model.norm.weight&truncate_size={rows}"
    )
    assert refused.status_code == 400 and "truncate_size is" in refused.text
    assert httpx.get(f"{server.url}/flush_cache?x={rows}").status_code == 200


def test_weight_tensor_may_have_a_numeric_name(server: LiveServer) -> None:
    assert len(httpx.get(f"{server.url}/get_weights_by_name?name=7&truncate_size=3").json()) == 3


def test_health_generate_makes_a_token(server: LiveServer) -> None:
    assert httpx.get(f"{server.url}/health_generate").status_code == 200
    [made] = server.engine.submitted
    assert made.sampling.max_tokens == 1


HALTS = [
    ("/pause_generation", {"mode": "in_place"}, "/continue_generation"),
    ("/engine/pause", {"in_flight": "recompute"}, "/engine/resume"),
    ("/engine/pause", {"new_requests": "refuse"}, "/engine/resume"),
    ("/engine/sleep", {"memory": ["kv_cache"]}, "/engine/wake"),
    ("/pause_generation", {"mode": "retract"}, "/resume"),
    ("/pause_generation", {}, "/resume"),
    ("/pause?mode=keep", None, "/resume"),
    ("/pause", None, "/resume"),
    ("/sleep?mode=keep", None, "/wake_up"),
]


def remedy(path: str) -> str:
    return "POST /engine/wake" if "sleep" in path else "POST /engine/resume"


def made_no_token(answer: httpx.Response, remedy: str) -> None:
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
    error = answer.json()["error"]
    assert error["code"] == "unavailable" and remedy in error["message"]


@pytest.mark.parametrize(("path", "body", "back"), HALTS)
def test_health_generate_reports_at_once_when_no_token_is_made(
    path: str, body: object, back: str, server: LiveServer
) -> None:
    assert post(server, path, body).status_code == 200
    made_no_token(httpx.get(f"{server.url}/health_generate"), remedy(path))
    assert not server.engine.submitted
    assert post(server, back).status_code == 200
    assert httpx.get(f"{server.url}/health_generate").status_code == 200


@pytest.mark.parametrize(("path", "body", "back"), HALTS)
def test_open_health_generate_does_not_wait_for_a_pause(
    path: str, body: object, back: str, server: LiveServer, pool: ThreadPoolExecutor
) -> None:
    server.engine.deaf = True
    asked = pool.submit(httpx.get, f"{server.url}/health_generate", timeout=60)
    until(lambda: len(server.client) == 1)
    halted = pool.submit(post, server, path, body)
    made_no_token(asked.result(30), remedy(path))
    server.engine.deaf = False
    assert halted.result(30).status_code == 200
    until(lambda: server.engine.aborted == [made.id for made in server.engine.submitted])
    assert len(server.client) == 0, "nothing is left of it"


def test_aborted_health_generate_made_no_token(
    server: LiveServer, pool: ThreadPoolExecutor
) -> None:
    server.engine.deaf = True
    asked = pool.submit(httpx.get, f"{server.url}/health_generate", timeout=60)
    until(lambda: len(server.client) == 1)
    assert post(server, "/abort_request", {"abort_all": True}).status_code == 200
    server.engine.deaf = False
    made_no_token(asked.result(30), "ask again")
