"""Scopes and keys: every route x method x key against the table in docs/keys.md, tenants,
rotation while serving, the audit.
"""

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.frontend.live_server import LiveServer, live_server
from tlt_server.frontend.http.endpoints import Endpoint
from tlt_server.frontend.http.keys import SCOPES
from tlt_server.frontend.http.replies import json_response

PAGE = Path(__file__).parents[2] / "docs" / "keys.md"
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS")
NEEDS = {"no key": "open", "any key": "any"}  # others name scopes
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
# Without a body this operation needs another scope than its route.
BODIES = {
    ("POST", path): {"request_ids": ["x"]}
    for path in ("/abort_requests", "/inference/v1/abort_requests")
}
LINES = "".join(f"key-{scope} scopes={scope} name={scope}\n" for scope in SCOPES) + "key-all\n"


def documented() -> dict[tuple[str, str], str]:
    """(method, path) -> what it needs, by the page."""
    section = PAGE.read_text().split("## Who may call what")[1].split("##")[0]
    return {
        (method, path): NEEDS.get(needs, needs.replace("`", ""))
        for needs, routes in re.findall(r"^\| ([^|]+) \| (`.*) \|$", section, re.MULTILINE)
        for methods, path in re.findall(r"`([A-Z,]*) ?(/\S*)`", routes)
        for method in (methods or "POST").split(",")
    }


@contextmanager
def with_keys(model: Path, directory: Path) -> Iterator[LiveServer]:
    state = directory / "state"
    with live_server(model, keys=LINES, weight_channels="http", state_dir=state) as server:
        yield server


@pytest.fixture(scope="module")
def keyed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with with_keys(model, tmp_path_factory.mktemp("keyed")) as server:
        yield server


def routes(server: LiveServer) -> list[Endpoint]:
    return server.app._app.routes  # type: ignore[attr-defined, no-any-return]


def test_every_route_has_the_scope_of_the_documentation(keyed: LiveServer) -> None:
    assert all(isinstance(route, Endpoint) for route in routes(keyed)), (
        "a route is served that no dialect's table holds"
    )
    assert {
        (route.method, route.path): route.needs + " or link" * route.link for route in routes(keyed)
    } == documented()

    async def handler(request: Any) -> Any:
        return json_response({})

    with pytest.raises(KeyError, match="needs"):
        Endpoint("GET", "/undeclared", handler)


def expected(route: Endpoint, method: str, needs: str, key: str) -> set[int] | None:
    """Statuses of the refusal; None where the request reaches its handler."""
    takes = method in (route.methods or ())
    if needs == "open":
        return None if takes else {405}
    if not KEYS[key]:
        return {401}
    if not takes:
        return {405}
    return None if needs == "any" or KEYS[key] & {*needs.split(" or ")} else {403}


def test_every_route_and_method_obeys_every_keys_scopes(model: Path, tmp_path: Path) -> None:
    """The server is the test's own, because some of the calls pause it."""
    needs = documented()
    places = sorted({re.sub(r"{\w+}", "x", path) for _, path in needs})
    asked = 0
    with (
        with_keys(model, tmp_path) as server,
        httpx.Client(base_url=server.url, timeout=20) as http,
    ):
        paths = {
            path: [route for route in routes(server) if route.path_regex.fullmatch(path)]
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


def test_without_keys_only_local_calls_reach_closed_routes(server: LiveServer) -> None:
    with httpx.Client(base_url=server.url, headers={"host": "evil.example"}, timeout=20) as http:
        for (method, path), needs in documented().items():
            reply = http.request(method, re.sub(r"{\w+}", "x", path))
            assert (reply.status_code == 403) == (needs != "open"), (method, path, reply.text)


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"},
        {"sec-fetch-site": "same-site"},
        {"origin": "http://localhost:9"},
    ],
    ids=lambda headers: next(iter(headers.values())),
)
def test_page_of_a_foreign_site_may_call_only_open_routes(
    headers: dict[str, str], keyed: LiveServer, model: Path
) -> None:
    """Each page's request is refused with every key and without keys, by any method."""
    with live_server(model) as open_server:
        for server, key in ((open_server, {}), (keyed, HEADERS["all"])):
            with httpx.Client(base_url=server.url, headers=headers | key, timeout=20) as http:
                for (method, path), needs in documented().items():
                    reply = http.request(method, re.sub(r"{\w+}", "x", path))
                    assert (reply.status_code == 403) == (needs != "open"), (method, path)
                assert http.head("/flush_cache").status_code == 403
            text = httpx.get(f"{server.url}/metrics", headers=key).text
            assert refusals(text)["foreign_page"] >= 70


def test_browser_header_vouches_for_a_page_served_by_a_proxy(keyed: LiveServer) -> None:
    """A proxy may pass another Host on than the browser sent."""
    page = {"origin": "https://tlt.example", "host": "upstream:8000"}
    for site, status in (({}, 403), ({"sec-fetch-site": "same-origin"}, 200)):
        reply = httpx.get(f"{keyed.url}/version", headers=HEADERS["data"] | page | site)
        assert reply.status_code == status, reply.text


def test_no_spelling_of_a_path_bypasses_its_scope(keyed: LiveServer) -> None:
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


def test_a_refusal_names_the_missing_scope_and_is_counted(keyed: LiveServer) -> None:
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


def test_server_info_shows_paths_only_to_push_and_operate_keys(keyed: LiveServer) -> None:
    infos = {
        key: httpx.get(f"{keyed.url}/server_info", headers=HEADERS[key]).json()
        for key in (*SCOPES, "all")
    }
    configs = {key: info["config"] for key, info in infos.items()}
    assert infos["data"]["host"] is infos["data"]["port"] is None
    assert infos["all"]["port"] == configs["all"]["port"] == keyed.config.port != 0
    assert configs["push-weights"] == configs["operate"] == configs["all"]
    assert configs["all"].keys() - configs["data"].keys() == {
        "model",
        "drafter",
        "weight_root",
        "state_dir",
        "host",
        "port",
    }
    assert configs["data"]["max_queue"]
    assert not {"api_key_file", "api_key_variable", "tls_key"} & configs["all"].keys()
