"""Scopes and keys: every route x method x key against the table in docs/keys.md, tenants,
rotation while serving, the audit.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.frontend.fake_engine import HANGS
from tests.frontend.live_server import LiveServer, live_server
from tests.frontend.test_limits import eventually
from tests.frontend.test_logs import lines, stream
from tlt_client import Client, ServerError
from tlt_server.frontend.http.endpoints import Endpoint
from tlt_server.frontend.http.keys import SCOPES
from tlt_server.frontend.http.replies import json_response

__all__ = ["stream"]  # a fixture
PAGE = Path(__file__).parents[2] / "docs" / "keys.md"
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS")
NEEDS = {"no key": "open", "any key": "any", **{f"`{scope}`": scope for scope in SCOPES}}
KEYS = {
    "none": frozenset[str](),
    "unknown": frozenset[str](),
    **{scope: frozenset([scope]) for scope in SCOPES},
    "all": frozenset(SCOPES),
}
HEADERS: dict[str, dict[str, str]] = {
    "none": {},
    "unknown": {"authorization": "Bearer key-unknown"},
    **{name: {"authorization": f"Bearer key-{name}"} for name in (*SCOPES, "all")},
}
BODIES = {
    ("POST", "/abort_requests"): {"request_ids": ["x"]}
}  # without one it asks for more than the route alone
LINES = "".join(f"key-{scope} scopes={scope} name={scope}\n" for scope in SCOPES) + "key-all\n"


def documented() -> dict[tuple[str, str], str]:
    """(method, path) -> what it needs, by the page."""
    section = PAGE.read_text().split("## Who may call what")[1].split("##")[0]
    return {
        (method, path): NEEDS[needs]
        for needs, routes in re.findall(r"^\| ([^|]+) \| (`.*) \|$", section, re.MULTILINE)
        for method, path in re.findall(r"`([A-Z]+) (\S+)`", routes)
    }


@contextmanager
def with_keys(model: Path, directory: Path) -> Iterator[LiveServer]:
    file = directory / "keys"
    file.write_text(LINES)
    with live_server(
        model, api_key_file=file, weight_channels="http", state_dir=directory / "state"
    ) as server:
        yield server


@pytest.fixture(scope="module")
def keyed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with with_keys(model, tmp_path_factory.mktemp("keyed")) as server:
        yield server


def routes(server: LiveServer) -> list[Endpoint]:
    return server.app._app.routes  # type: ignore[attr-defined, no-any-return]


def test_every_route_declares_what_it_needs_and_the_page_says_so(keyed: LiveServer) -> None:
    assert all(isinstance(route, Endpoint) for route in routes(keyed)), (
        "a route is served that no dialect's table holds"
    )
    assert {(route.method, route.path): route.needs for route in routes(keyed)} == documented()

    async def handler(request: Any) -> Any:
        return json_response({})

    with pytest.raises(TypeError, match="needs"):
        Endpoint("GET", "/undeclared", handler)  # type: ignore[call-arg]


def expected(route: Endpoint, method: str, needs: str, key: str) -> set[int] | None:
    """Statuses of the refusal; None where the request reaches its handler."""
    takes = method in (route.methods or ())
    if needs == "open":
        return None if takes else {405}
    if not KEYS[key]:
        return {401}
    if not takes:
        return {405}
    return None if needs == "any" or needs in KEYS[key] else {403}


def test_every_route_with_every_method_and_every_key(model: Path, tmp_path: Path) -> None:
    """The server is the test's own, because some of the calls pause it."""
    needs = documented()
    places = sorted({re.sub(r"{\w+}", "x", path) for _, path in needs})
    asked = 0
    with (
        with_keys(model, tmp_path) as server,
        httpx.Client(base_url=server.url, timeout=20) as http,
    ):
        paths = {
            path: [
                route
                for route in routes(server)
                if re.fullmatch(re.sub(r"{\w+}", "[^/]+", route.path), path)
            ]
            for path in places
        }
        for (path, found), method, key in itertools.product(paths.items(), METHODS, KEYS):
            route = next((route for route in found if method in (route.methods or ())), found[0])
            statuses = expected(route, method, needs[route.method, route.path], key)
            reply = http.request(
                method, path, headers=HEADERS[key], json=BODIES.get((method, path))
            )
            asked += 1
            if statuses is None:
                assert reply.status_code not in (401, 403, 405), (method, path, key, reply.text)
            else:
                assert reply.status_code in statuses, (method, path, key, reply.text)
    assert asked == len(paths) * len(METHODS) * len(KEYS) >= 900


def test_without_keys_only_this_machine_may_call_what_is_not_open(server: LiveServer) -> None:
    with httpx.Client(base_url=server.url, headers={"host": "evil.example"}, timeout=20) as http:
        for (method, path), needs in documented().items():
            reply = http.request(method, re.sub(r"{\w+}", "x", path))
            assert (reply.status_code == 403) == (needs != "open"), (method, path, reply.text)


def test_the_router_and_the_gate_agree_on_the_route(keyed: LiveServer) -> None:
    """No spelling of a path that needs a scope reaches the handler without it."""
    for path in (
        "/strategy",
        "/strategy/",
        "//strategy",
        "/./strategy",
        "/%73trategy",
        "/strategy?x=/livez",
        "/livez/../strategy",
        "/STRATEGY",
    ):
        for key in ("none", "unknown", "data", "push-weights"):
            with httpx.Client(base_url=keyed.url) as http:
                reply = http.send(
                    http.build_request(
                        "GET",
                        httpx.URL(keyed.url).copy_with(raw_path=path.encode()),
                        headers=HEADERS[key],
                    )
                )
            assert reply.status_code in (401, 403, 404), (path, key, reply.text)


def test_a_refusal_says_which_scope_is_missing_and_is_counted(keyed: LiveServer) -> None:
    def counted(reason: str) -> float:
        return refusals(httpx.get(f"{keyed.url}/metrics", headers=HEADERS["operate"]).text).get(
            reason, 0.0
        )

    before = {reason: counted(reason) for reason in ("no_key", "unknown_key", "scope")}
    error = httpx.put(f"{keyed.url}/strategy", headers=HEADERS["data"]).json()["error"]
    assert error["code"] == "forbidden"
    assert error["message"].startswith(
        "the key data has the scopes data, and this needs operate; use another"
    )
    assert "scopes=data,operate" in error["message"]
    assert [
        httpx.get(f"{keyed.url}/strategy", headers=HEADERS[key]).status_code
        for key in ("none", "unknown")
    ] == [401, 401]
    assert {reason: counted(reason) - value for reason, value in before.items()} == {
        "no_key": 1,
        "unknown_key": 1,
        "scope": 1,
    }


def refusals(exposition: str) -> dict[str, float]:
    found = re.findall(r'^tlt_auth_refusals_total{reason="(\w+)"} (\S+)$', exposition, re.MULTILINE)
    return {reason: float(value) for reason, value in found}


def test_server_info_names_places_only_to_keys_that_push_or_operate(keyed: LiveServer) -> None:
    configs = {
        key: httpx.get(f"{keyed.url}/server_info", headers=HEADERS[key]).json()["config"]
        for key in (*SCOPES, "all")
    }
    assert configs["push-weights"] == configs["operate"] == configs["all"]
    assert configs["all"].keys() - configs["data"].keys() == {
        "model",
        "drafter",
        "weight_root",
        "state_dir",
        "host",
        "port",
    }
    assert (
        configs["data"]["max_queue"]
        and not {"api_key_file", "api_key_variable", "tls_key"} & configs["all"].keys()
    )


# tenants

TENANTS = (
    "a scopes=data name=a\nb scopes=data name=b\n"
    "old scopes=data name=a\nroot scopes=data,operate name=root\n"
)


def test_a_key_sees_its_own_rollouts_and_operate_sees_all(model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(TENANTS)
    with live_server(model, api_key_file=tmp_path / "keys") as server:
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


def test_a_key_aborts_its_own_requests_and_operate_aborts_all(model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(LINES)
    with (
        live_server(model, api_key_file=tmp_path / "keys") as server,
        ThreadPoolExecutor(3) as pool,
    ):

        def ask(id: str, key: str) -> httpx.Response:
            return httpx.post(
                f"{server.url}/inference/v1/generate",
                json={"request_id": id, "token_ids": [HANGS]},
                headers=HEADERS[key],
            )

        def abort(path: str, body: dict[str, Any], key: str) -> int:
            return httpx.post(f"{server.url}{path}", json=body, headers=HEADERS[key]).status_code

        first, second, third = (
            pool.submit(ask, "a", "data"),
            pool.submit(ask, "b", "all"),
            pool.submit(ask, "c", "all"),
        )
        eventually(lambda: len(server.engine.running) == 3)
        assert (
            abort("/abort_request", {"rid": "b"}, "data") == 200
            and abort("/abort_requests", {"request_ids": ["c"]}, "data") == 200
        )
        for path, everything in (("/abort_request", {"abort_all": True}), ("/abort_requests", {})):
            assert abort(path, everything, "data") == 403
        assert abort("/abort_request", {"rid": "a"}, "data") == 200
        assert first.result().json()["choices"][0]["finish_reason"] == "abort"
        assert len(server.engine.aborted) == 1 and len(server.engine.running) == 2, (
            "the others are not this key's"
        )
        assert abort("/abort_requests", {"request_ids": ["b"]}, "operate") == 403, (
            "the route needs data"
        )
        assert (
            abort("/abort_requests", {"request_ids": ["b"]}, "all") == 200
            and second.result().status_code == 200
        )
        assert (
            abort("/abort_request", {"abort_all": True}, "all") == 200
            and third.result().status_code == 200
        )


def test_an_idempotency_key_is_its_owners(model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(TENANTS)
    with live_server(model, api_key_file=tmp_path / "keys") as server:

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


def test_owners_outlive_the_process(model: Path, tmp_path: Path) -> None:
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
    with live_server(model, state_dir=tmp_path / "state") as server, Client(server.url) as anybody:
        assert [kept.owner for kept in anybody.rollouts()] == ["a"], (
            "without keys everybody has all scopes"
        )


# rotation


def status(server: LiveServer, key: str) -> int:
    return httpx.get(
        f"{server.url}/v1/models", headers={"authorization": f"Bearer {key}"}
    ).status_code


def test_keys_are_replaced_while_serving_and_a_broken_file_changes_nothing(
    model: Path, tmp_path: Path, stream: io.StringIO
) -> None:
    file = tmp_path / "keys"
    file.write_text("old scopes=data name=trainer\n")
    with live_server(model, api_key_file=file) as server:
        assert (status(server, "old"), status(server, "new")) == (200, 401)
        replace(file, "new scopes=data name=trainer\n")
        eventually(lambda: status(server, "new") == 200)
        assert status(server, "old") == 401
        for broken in ("typo scopes=dta\n", ""):
            refused = len([line for line in lines(stream) if line["event"] == "file_refused"])
            replace(file, broken)
            eventually(
                lambda: (
                    len([1 for line in lines(stream) if line["event"] == "file_refused"]) > refused  # noqa: B023
                    or status(server, "new") != 200
                )
            )
            time.sleep(1.1)
            assert status(server, "new") == 200
            said = [line for line in lines(stream) if line["event"] == "file_refused"]
            assert len(said) == refused + 1, "said once"
            assert "typo" not in json.dumps(said)
        file.unlink()
        eventually(
            lambda: (
                status(server, "new")
                and len([1 for line in lines(stream) if line["event"] == "file_refused"]) == 3
            )
        )
        replace(file, "newest scopes=data,operate name=trainer\n")
        eventually(lambda: status(server, "newest") == 200)
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


def test_accepted_admin_calls_have_an_audit_line_that_says_who_what_and_which_version(
    keyed: LiveServer, stream: io.StringIO
) -> None:
    def post(path: str, body: Any, key: str = "push-weights", method: str = "POST") -> None:
        httpx.request(method, f"{keyed.url}{path}", json=body, headers=HEADERS[key])

    post("/update_weights", {"version": "step-7", "path": "p"})
    post(
        "/update_weights", {"version": "step-8", "path": "weights_refused"}
    )  # not accepted by the engine
    post("/update_weights", {"version": "step-8", "path": "p"}, "data")  # nor this by the gate
    post("/update_weights", {"version": "step-8", "path": "p", "commit": False})
    post("/weights/step-8/abort", {})
    post("/weights/rollback", {"to": "v0"})
    post("/strategy", {"policy": "off"}, "operate", "PUT")
    post("/generate", {"requests": [{"prompt": "a"}], "sampling": {"max_tokens": 1}}, "data")
    httpx.get(f"{keyed.url}/weights", headers=HEADERS["push-weights"])
    eventually(lambda: len([line for line in lines(stream) if line["event"] == "request"]) >= 9)
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
