"""Tenants: a key's rollouts and requests, keys replaced while serving, and the audit of calls."""

import io
import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.frontend.fake_engine import HANGS
from tests.frontend.live_server import LiveServer, live_server, server_and_client
from tests.frontend.test_auth import HEADERS, LINES, keyed
from tests.frontend.test_logs import lines, stream
from tests.waiting import until
from tlt_client import Client, ServerError
from tlt_client.rpc import GetInfoRequest, RolloutServiceStub, WatchEventsRequest

__all__ = ["keyed", "stream"]  # fixtures


# tenants

TENANTS = (
    "a scopes=data name=a\nb scopes=data name=b\n"
    "old scopes=data name=a\nroot scopes=data,operate name=root\n"
)


def test_a_key_sees_its_own_rollouts_and_operate_sees_all(model: Path) -> None:
    with live_server(model, keys=TENANTS) as server:
        clients = {
            key: Client(server.url, api_key=key, timeout_s=20) for key in ("a", "b", "old", "root")
        }
        a, b = (clients[key].generate([{"token_ids": [HANGS]}], detach=True) for key in ("a", "b"))
        assert {
            key: {rollout.owner for rollout in client.rollouts()} for key, client in clients.items()
        } == {"a": {"a"}, "b": {"b"}, "old": {"a"}, "root": {"a", "b"}}, (
            "two keys of one name are one tenant"
        )
        for refused in (clients["b"].rollout(a.id).fetch, clients["b"].rollout(a.id).delete):
            with pytest.raises(ServerError) as caught:
                refused()
            with pytest.raises(ServerError) as unknown:
                clients["b"].rollout("r-none").fetch()
            assert caught.value.code == "not_found"
            assert caught.value.message.replace(a.id, "") == unknown.value.message.replace(
                "r-none", ""
            ), "not even that it exists"
        assert (
            clients["old"].rollout(a.id).fetch().status
            == clients["root"].rollout(a.id).fetch().status
            == "running"
        )
        clients["root"].rollout(a.id).delete()
        assert [rollout.id for rollout in clients["root"].rollouts()] == [b.id]
        for client in clients.values():
            client.close()


def test_busy_key_does_not_block_requests_of_a_second_key(model: Path) -> None:
    with live_server(model, keys=TENANTS, max_connections=6, grpc_port=0) as server:
        greedy, small = ({"authorization": f"Bearer {key}"} for key in "ab")
        with ExitStack() as stack:
            for _ in range(6):
                waiting = httpx.stream("GET", f"{server.url}/events?wait_s=900", headers=greedy)
                assert stack.enter_context(waiting).status_code == 200
            refused = httpx.get(f"{server.url}/server_info", headers=greedy)
            assert refused.status_code == 503 and "7 requests are in progress" in refused.text
            for _ in range(3):
                waiting = httpx.stream("GET", f"{server.url}/events?wait_s=900", headers=small)
                assert stack.enter_context(waiting).status_code == 200
            refused = httpx.get(f"{server.url}/server_info", headers=small)
            assert refused.status_code == 503
            assert "10 requests are in progress, 4 of" in refused.text
        with grpc.insecure_channel(server.grpc_address) as channel:
            stub, watch = RolloutServiceStub(channel), WatchEventsRequest()
            watches = []
            for _ in range(6):
                watches.append(stub.WatchEvents(watch, metadata=[*greedy.items()]))
                assert next(watches[-1]).state.ready
            with pytest.raises(grpc.RpcError, match="7 requests are in progress"):
                stub.GetInfo(GetInfoRequest(), metadata=[*greedy.items()])
            assert stub.GetInfo(GetInfoRequest(), metadata=[*small.items()]).ready
            for each in watches:
                each.cancel()


def test_a_key_aborts_its_own_requests_and_operate_aborts_all(model: Path) -> None:
    with live_server(model, keys=LINES) as server, ThreadPoolExecutor(3) as pool:

        def ask(id: str, key: str) -> httpx.Response:
            return httpx.post(
                f"{server.url}/inference/v1/generate",
                json={"request_id": id, "token_ids": [HANGS]},
                headers=HEADERS[key],
            )

        def abort(path: str, body: dict[str, Any] | None, key: str) -> int:
            return httpx.post(f"{server.url}{path}", json=body, headers=HEADERS[key]).status_code

        first = pool.submit(ask, "a", "data")
        second = pool.submit(ask, "b", "all")
        third = pool.submit(ask, "c", "all")
        until(lambda: len(server.engine.running) == 3)
        assert abort("/abort_request", {"rid": "b"}, "data") == 200
        assert abort("/abort_requests", {"request_ids": ["c"]}, "data") == 200
        for path, everything in (
            ("/abort_request", {"abort_all": True}),
            ("/abort_requests", None),
        ):
            assert abort(path, everything, "data") == 403
        assert abort("/abort_request", {"rid": "a"}, "data") == 200
        assert first.result().json()["choices"][0]["finish_reason"] == "abort"
        assert len(server.engine.aborted) == 1 and len(server.engine.running) == 2, (
            "the others are not this key's"
        )
        assert abort("/abort_requests", {"request_ids": ["b"]}, "operate") == 403, (
            "the route needs data"
        )
        assert abort("/abort_requests", {"request_ids": ["b"]}, "all") == 200
        assert second.result().status_code == 200
        assert abort("/abort_request", {"abort_all": True}, "all") == 200
        assert third.result().status_code == 200


def test_idempotency_keys_of_different_owners_are_independent(model: Path) -> None:
    with live_server(model, keys=TENANTS) as server:

        def ask(key: str, prompt: str) -> httpx.Response:
            return httpx.post(
                f"{server.url}/generate",
                headers={"authorization": f"Bearer {key}", "idempotency-key": "step-1"},
                json={"requests": [{"prompt": prompt}], "sampling": {"max_tokens": 3}},
            )

        replies = {key: ask(key, key * 3) for key in ("a", "b", "root")}
        assert all(reply.status_code == 200 for reply in replies.values()), (
            "no conflict between tenants"
        )
        assert len({reply.headers["x-rollout-id"] for reply in replies.values()}) == 3
        assert ask("old", "aaa").headers["x-rollout-id"] == replies["a"].headers["x-rollout-id"]
        assert ask("a", "other").status_code == 409


def test_rollout_owners_survive_a_server_restart(model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(TENANTS)
    settings = {"api_key_file": tmp_path / "keys", "state_dir": tmp_path / "state"}
    with (
        live_server(model, **settings) as server,
        Client(server.url, api_key="a", timeout_s=20) as client,
    ):
        rollout = client.generate([{"prompt": "abc"}], sampling={"max_tokens": 2}, detach=True)
        rollout.result(30)
    with live_server(model, **settings) as server:
        with Client(server.url, api_key="b") as stranger:
            assert stranger.rollouts() == []
        with Client(server.url, api_key="a") as client:
            assert [(kept.id, kept.owner) for kept in client.rollouts()] == [(rollout.id, "a")]
    with server_and_client(model, state_dir=tmp_path / "state") as (server, anybody):
        assert [kept.owner for kept in anybody.rollouts()] == ["a"], (
            "without keys everybody has all scopes"
        )


# priorities


@pytest.mark.parametrize(
    ("path", "body", "native"),
    [
        ("/generate", {"requests": [{"prompt": "a"}], "priority": 3}, 3),
        ("/generate", {"text": "a", "priority": -3}, 3),  # SGLang: higher values first
        ("/v1/completions", {"prompt": "a", "priority": 3}, 3),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, 0),
        ("/inference/v1/generate", {"token_ids": [1], "priority": 3}, 3),
    ],
)
def test_the_engine_gets_owner_and_priority(
    path: str, body: dict[str, Any], native: int, keyed: LiveServer
) -> None:
    reply = httpx.post(keyed.url + path, json=body, headers=HEADERS["data"])
    assert reply.status_code == 200, reply.text
    asked = keyed.engine.submitted[-1]
    assert (asked.owner, asked.priority) == ("data", native)


def test_only_operate_keys_may_raise_a_priority(keyed: LiveServer) -> None:
    for path, body in (
        ("/generate", {"requests": [{"prompt": "a"}], "priority": -1}),
        ("/generate", {"text": "a", "priority": 1}),
        ("/v1/completions", {"prompt": "a", "priority": -1}),
    ):
        refused = httpx.post(keyed.url + path, json=body, headers=HEADERS["data"])
        assert refused.status_code == 403, refused.text
        assert "the priority is 1 ahead of the default" in refused.text
        assert "the key data lacks the scope operate" in refused.text
        assert httpx.post(keyed.url + path, json=body, headers=HEADERS["all"]).status_code == 200
        assert keyed.engine.submitted[-1].priority == -1


def test_key_filling_the_queue_does_not_block_a_second_key(model: Path) -> None:
    hangs = {"requests": [{"token_ids": [HANGS]}] * 4, "stream": True}
    one = {"requests": [{"prompt": "a"}], "sampling": {"max_tokens": 2}}
    with live_server(model, keys=LINES, max_queue=4) as server:
        with httpx.stream(
            "POST", f"{server.url}/generate", json=hangs, headers=HEADERS["data"]
        ) as greedy:
            assert greedy.status_code == 200
            until(lambda: len(server.engine.running) == 4)
            refused = httpx.post(f"{server.url}/generate", json=one, headers=HEADERS["data"])
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert "4 sequences are open and 1 more are over the limit of 4" in refused.text
            taken = httpx.post(f"{server.url}/generate", json=one, headers=HEADERS["all"])
            assert taken.status_code == 200, taken.text
        until(lambda: len(server.client) == 0)


# rotation


def status(server: LiveServer, key: str) -> int:
    return httpx.get(
        f"{server.url}/v1/models", headers={"authorization": f"Bearer {key}"}
    ).status_code


def test_keys_reload_while_serving_and_ignore_a_broken_file(
    model: Path, tmp_path: Path, stream: io.StringIO
) -> None:
    file = tmp_path / "keys"
    file.write_text("old scopes=data name=trainer\n")
    with live_server(model, api_key_file=file) as server:
        assert (status(server, "old"), status(server, "new")) == (200, 401)
        replace(file, "new scopes=data name=trainer\n")
        until(lambda: status(server, "new") == 200)
        assert status(server, "old") == 401
        for broken in ("typo scopes=dta\n", ""):
            refused = len([line for line in lines(stream) if line["event"] == "file_refused"])
            replace(file, broken)
            until(
                lambda: (
                    len([1 for line in lines(stream) if line["event"] == "file_refused"]) > refused  # noqa: B023
                    or status(server, "new") != 200
                )
            )
            time.sleep(1.1)
            assert status(server, "new") == 200
            logged = [line for line in lines(stream) if line["event"] == "file_refused"]
            assert len(logged) == refused + 1, "logged once"
            assert "typo" not in json.dumps(logged)
        file.unlink()
        until(
            lambda: (
                status(server, "new")
                and len([1 for line in lines(stream) if line["event"] == "file_refused"]) == 3
            )
        )
        replace(file, "newest scopes=data,operate name=trainer\n")
        until(lambda: status(server, "newest") == 200)
        text = httpx.get(f"{server.url}/metrics", headers={"authorization": "Bearer newest"}).text
        reads = re.findall(
            r'^tlt_file_reads_total{file="api_keys",result="(\w+)"} (\S+)$', text, re.MULTILINE
        )
        assert dict(reads) == {"read": "3.0", "refused": "3.0"}


def replace(file: Path, content: str) -> None:
    beside = file.with_suffix(".new")
    beside.write_text(content)
    os.replace(beside, file)


# the audit


def test_accepted_admin_calls_log_key_action_and_version(
    keyed: LiveServer, stream: io.StringIO
) -> None:
    def post(path: str, body: Any, key: str = "push-weights", method: str = "POST") -> None:
        httpx.request(method, f"{keyed.url}{path}", json=body, headers=HEADERS[key])

    post("/update_weights", {"version": "step-7", "path": "p"})
    # The engine refuses the first of these, and the gate the second.
    post("/update_weights", {"version": "step-8", "path": "weights_refused"})
    post("/update_weights", {"version": "step-8", "path": "p"}, "data")
    post("/update_weights", {"version": "step-8", "path": "p", "commit": False})
    post("/weights/step-8/abort", {})
    post("/weights/rollback", {"to": "v0"})
    post("/strategy", {"policy": "off"}, "operate", "PUT")
    post("/generate", {"requests": [{"prompt": "a"}], "sampling": {"max_tokens": 1}}, "data")
    httpx.get(f"{keyed.url}/weights", headers=HEADERS["push-weights"])
    until(lambda: len([line for line in lines(stream) if line["event"] == "request"]) >= 9)
    audit = [
        (line.get("key"), line["method"], line["route"], line.get("version"))
        for line in lines(stream)
        if line["event"] == "audit"
    ]
    assert audit == [
        ("push-weights", "POST", "/update_weights", "step-7"),
        ("push-weights", "POST", "/update_weights", "step-8"),
        ("push-weights", "POST", "/weights/{version}/abort", "step-8"),
        ("push-weights", "POST", "/weights/rollback", "v0"),
        ("operate", "PUT", "/strategy", None),
    ]
    who = [(line["route"], line.get("key")) for line in lines(stream) if line["event"] == "request"]
    assert ("/generate", "data") in who and ("/weights", "push-weights") in who
    assert all("key-" not in json.dumps(line) for line in lines(stream))


def test_a_change_of_state_by_get_or_head_is_audited(
    keyed: LiveServer, stream: io.StringIO
) -> None:
    for method in ("GET", "HEAD"):
        reply = httpx.request(method, f"{keyed.url}/flush_cache", headers=HEADERS["operate"])
        assert reply.status_code == 200
    assert httpx.get(f"{keyed.url}/strategy", headers=HEADERS["operate"]).status_code == 200
    until(lambda: len([line for line in lines(stream) if line["event"] == "request"]) == 3)
    audit = [
        (line["method"], line["route"], line["key"])
        for line in lines(stream)
        if line["event"] == "audit"
    ]
    assert audit == [("GET", "/flush_cache", "operate"), ("HEAD", "/flush_cache", "operate")]


ABORTS = {
    "/abort_requests": (
        [],
        None,
        "all",
        {},
        {"request_ids": []},
        {"request_ids": None},
        {"request_id": ["a"]},
        {"ids": ["a"]},
        {"request_ids": "a"},
        {"request_ids": [""]},
    ),
    "/abort_request": (
        [],
        {},
        {"rid": ""},
        {"rid": None, "abort_all": False},
        {"rids": ["a"]},
        {"abort_al": True},
        {"abort_all": "true"},
    ),
    "/engine/abort": ([], {}, {"ids": []}, {"al": True}, {"all": False}, {"rid": "a"}),
}


@pytest.mark.parametrize("path", ABORTS)
def test_abort_without_a_name_or_all_ends_no_request(model: Path, path: str) -> None:
    with live_server(model) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            httpx.post,
            f"{server.url}/inference/v1/generate",
            json={"request_id": "kept", "token_ids": [HANGS]},
        )
        until(lambda: len(server.engine.running) == 1)
        for body in ABORTS[path]:
            reply = httpx.post(f"{server.url}{path}", content=json.dumps(body))
            message = reply.json()["error"]["message"]
            assert reply.status_code == 400, (body, reply.text)
            assert re.search("send no body|abort_all|give exactly one|known: |must", message), body
        assert httpx.post(f"{server.url}{path}").status_code == (
            200 if path == "/abort_requests" else 400
        )
        if path != "/abort_requests":
            assert not server.engine.aborted and len(server.engine.running) == 1
            server.call(lambda: server.client.abort(server.client.open_ids))
        assert asked.result(30).json()["choices"][0]["finish_reason"] == "abort"


def test_abort_of_everything_logs_its_caller_and_count(
    keyed: LiveServer, stream: io.StringIO
) -> None:
    calls: list[tuple[str, Any]] = [
        ("/abort_requests", None),
        ("/abort_request", {"abort_all": True}),
        ("/engine/abort", {"all": True}),
        ("/engine/abort", {"ids": ["one"]}),
    ]
    with ThreadPoolExecutor(2) as pool:
        for path, body in calls:
            asked = pool.submit(
                httpx.post,
                f"{keyed.url}/generate",
                json={"requests": [{"id": "one", "token_ids": [HANGS], "n": 2}]},
                headers=HEADERS["all"],
            )
            until(lambda: len(keyed.engine.running) == 2)
            reply = httpx.post(f"{keyed.url}{path}", json=body, headers=HEADERS["all"])
            assert reply.status_code == 200 and asked.result(30).status_code == 200
    assert httpx.post(f"{keyed.url}/abort_requests", headers=HEADERS["data"]).status_code == 403
    until(lambda: len([line for line in lines(stream) if line["event"] == "audit"]) == 4)
    owner = next(line for line in lines(stream) if line.get("route") == "/generate")["key"]
    audit = [
        (line["route"], line["action"], line["sequences"], line["key"])
        for line in lines(stream)
        if line["event"] == "audit"
    ]
    assert audit == [
        ("/abort_requests", "abort all", 2, owner),
        ("/abort_request", "abort all", 2, owner),
        ("/engine/abort", "abort all", 2, owner),
        ("/engine/abort", "abort", 2, owner),
    ]
