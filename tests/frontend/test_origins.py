"""Pages of other sites that the setting `allowed_origins` lists: what their browsers are told, and
that nothing changes for all others.
"""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.frontend.fake_engine import FAILS
from tests.frontend.live_server import LiveServer, live_server
from tests.frontend.test_auth import documented, refusals
from tests.frontend.test_limits import connect, read_all
from tlt_server.config import Config
from tlt_server.errors import StartupError

LISTED, APP, OTHER = "https://chat.example", "app://obsidian.md", "https://evil.example"
KEY = {"authorization": "Bearer the-key"}
PROMPT = {"requests": [{"prompt": "a"}], "sampling": {"max_tokens": 1}}


def page(origin: str, site: str = "cross-site") -> dict[str, str]:
    """Return the headers that a browser adds to what a page fetches."""
    return {"origin": origin, "sec-fetch-site": site, "sec-fetch-mode": "cors"}


def preflight(origin: str, method: str = "POST") -> dict[str, str]:
    return page(origin) | {
        "access-control-request-method": method,
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }


@pytest.fixture(scope="module")
def listing(model: Path) -> Iterator[LiveServer]:
    """A server with keys that lists two origins."""
    keys = "the-key\nonly-data scopes=data name=eval\n"
    origins = f"{LISTED}, {APP}"
    with live_server(model, allowed_origins=origins, keys=keys, max_body_mb=1) as running:
        yield running


@pytest.fixture(scope="module")
def http(listing: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=listing.url, timeout=20) as client:
        yield client


def shown_to(reply: httpx.Response) -> str | None:
    """Return the origin whose pages may read a reply; never with a browser's credentials."""
    assert "access-control-allow-credentials" not in reply.headers
    assert "Origin" in reply.headers["vary"].split(", ")
    return reply.headers.get("access-control-allow-origin")


def test_a_preflight_of_a_listed_page_needs_no_key(http: httpx.Client) -> None:
    """The answer comes before the router, keys and limits, so unknown paths pass, too."""
    for path, method in (("/generate", "POST"), ("/strategy", "PUT"), ("/no/such", "DELETE")):
        for origin in (LISTED, APP):
            reply = http.options(path, headers=preflight(origin, method))
            assert (reply.status_code, shown_to(reply)) == (200, origin)
            allowed = reply.headers["access-control-allow-headers"].lower()
            assert {"authorization", "content-type", "x-stainless-lang"} <= {*allowed.split(",")}
            assert method in reply.headers["access-control-allow-methods"].split(", ")
            assert int(reply.headers["access-control-max-age"]) >= 600


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_listed_page_calls_with_its_key(http: httpx.Client, site: str) -> None:
    reply = http.post("/generate", json=PROMPT, headers=KEY | page(LISTED, site))
    assert (reply.status_code, shown_to(reply)) == (200, LISTED)
    assert reply.headers["access-control-expose-headers"] == "*"
    with http.stream(
        "POST", "/generate", json=PROMPT | {"stream": True}, headers=KEY | page(LISTED, site)
    ) as stream:
        assert (stream.status_code, shown_to(stream)) == (200, LISTED)
        assert "event: done" in stream.read().decode()


def test_a_listed_page_can_read_every_refusal(http: httpx.Client, listing: LiveServer) -> None:
    """Refusals of keys, scopes, the router, limits, a request, the engine, and faults of ours."""
    fails = {"requests": [{"token_ids": [65, FAILS]}]}
    data = {"authorization": "Bearer only-data"}
    for method, path, headers, body, status in (
        ("POST", "/generate", {}, PROMPT, 401),
        ("GET", "/metrics", data, None, 403),
        ("GET", "/no/such", KEY, None, 404),
        ("PATCH", "/generate", KEY, PROMPT, 405),
        ("POST", "/generate", KEY, {"requests": 1}, 400),
        ("POST", "/generate", KEY, {"prompt": "a" * 2**20}, 413),
        ("POST", "/generate", KEY, fails, 500),
    ):
        request = http.build_request(method, path, json=body, headers=headers | page(LISTED))
        reply = http.send(request)
        assert (reply.status_code, shown_to(reply)) == (status, LISTED), (path, reply.text)
        assert '"message":"' in reply.text
    route = next(
        route
        for route in listing.app._app._app.routes  # type: ignore[attr-defined]
        if route.path == "/version"
    )
    served = route.app

    async def broken(*arguments: object) -> None:
        raise ZeroDivisionError

    route.app = broken
    try:
        reply = http.get("/version", headers=KEY | page(LISTED))
    finally:
        route.app = served
    assert (reply.status_code, shown_to(reply)) == (500, LISTED)


UNREADABLE = {  # what follows the header Origin in requests that no middleware sees
    "bad header": "host: localhost\r\na b: c\r\n\r\n",
    "no host": "\r\n",
    "two hosts": "host: localhost\r\nhost: localhost\r\n\r\n",
    "headers too large": "host: localhost\r\n" + "a: " + "b" * 34000,
    "two lengths": "host: localhost\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
    "bad chunk": "host: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
}


@pytest.mark.parametrize("follows", UNREADABLE)
@pytest.mark.parametrize("origin", [LISTED, OTHER])
def test_listed_page_can_read_refusals_of_the_http_parser(
    follows: str, origin: str, listing: LiveServer
) -> None:
    with connect(listing) as connection:
        lines = f"POST /generate HTTP/1.1\r\norigin: {origin}\r\n"
        connection.sendall((lines + UNREADABLE[follows]).encode())
        said = read_all(connection).decode().lower()
    assert said.startswith("http/1.1 400 ") and "\r\nvary: origin\r\n" in said, said
    for name, value in (("allow-origin", LISTED), ("expose-headers", "*")):
        assert (f"\r\naccess-control-{name}: {value}\r\n" in said) == (origin == LISTED), said
    assert "access-control-allow-credentials" not in said


def test_allowed_origin_applies_only_to_its_own_request(listing: LiveServer) -> None:
    with connect(listing) as connection:
        connection.sendall(
            f"GET /livez HTTP/1.1\r\nhost: localhost\r\norigin: {LISTED}\r\n\r\n".encode()
        )
        first = connection.recv(65536).decode().lower()
        connection.sendall(b"no request\r\n\r\n")
        second = read_all(connection).decode().lower()
    assert first.startswith("http/1.1 200 ") and "access-control-allow-origin" in first
    assert second.startswith("http/1.1 400 ") and "access-control-allow-origin" not in second


@pytest.mark.parametrize(
    "headers",
    [
        page(OTHER),
        page("https://chat.example.evil.example"),
        page("https://chat.example:8443"),
        page("http://chat.example"),
        page("HTTPS://CHAT.EXAMPLE"),
        page("null"),
        page(f"{LISTED}, {OTHER}"),
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
    ],
    ids=lambda headers: headers.get("origin", "no origin"),
)
def test_page_of_an_unlisted_origin_is_refused(headers: dict[str, str], http: httpx.Client) -> None:
    before = refusals(http.get("/metrics", headers=KEY).text).get("foreign_page", 0)
    asked = 0
    for (method, path), needs in documented().items():
        if needs != "open" and method == "POST":
            reply = http.post(path, headers=KEY | headers)
            assert (reply.status_code, shown_to(reply)) == (403, None), path
            asked += 1
    for path in ("/generate", "/v1/chat/completions"):
        reply = http.options(path, headers={**preflight(OTHER), **headers})
        assert reply.status_code == 403 and "access-control-allow-origin" not in reply.headers
        assert "--allowed-origins" in reply.json()["error"]["message"]
        asked += 1
    assert refusals(http.get("/metrics", headers=KEY).text)["foreign_page"] == before + asked > 50
    assert shown_to(http.get("/livez", headers=headers)) is None


def test_two_origins_in_one_request_are_refused(http: httpx.Client) -> None:
    twice = [*KEY.items(), ("origin", LISTED), ("origin", OTHER), ("sec-fetch-site", "cross-site")]
    for method in ("GET", "OPTIONS"):
        reply = http.request(method, "/version", headers=twice)
        assert reply.status_code == 403, reply.text


def test_replies_without_origin_vary_on_origin_and_name_no_page(http: httpx.Client) -> None:
    """A cache must not give a page what it kept for a program."""
    reply = http.get("/version", headers=KEY)
    assert reply.status_code == 200 and shown_to(reply) is None


def test_without_allowed_origins_no_reply_has_cors_headers(server: LiveServer) -> None:
    for reply in (
        httpx.get(f"{server.url}/livez", headers=page(LISTED)),
        httpx.get(f"{server.url}/version"),
        httpx.options(f"{server.url}/generate", headers=preflight(LISTED)),
    ):
        assert not [name for name in reply.headers if name.startswith("access-control")]
        assert "vary" not in reply.headers
    with connect(server) as connection:
        connection.sendall(f"GET / HTTP/1.1\r\norigin: {LISTED}\r\n\r\n".encode())
        said = read_all(connection).lower()
    assert said.startswith(b"http/1.1 400 ") and b"vary" not in said and b"origin" not in said


def test_without_keys_a_listed_page_may_call_only_loopback(model: Path) -> None:
    with live_server(model, allowed_origins="http://localhost:3000") as open_server:
        ours = page("http://localhost:3000")
        reply = httpx.post(f"{open_server.url}/generate", json=PROMPT, headers=ours)
        assert (reply.status_code, shown_to(reply)) == (200, "http://localhost:3000")
        foreign_name = ours | {"host": "evil.example"}
        reply = httpx.post(f"{open_server.url}/generate", json=PROMPT, headers=foreign_name)
        assert reply.status_code == 403 and "Host" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "origin",
    [
        "*",
        "null",
        "chat.example",
        "https://chat.example/",
        "https://chat.example/page",
        "https://Chat.example",
        "HTTPS://chat.example",
        "https://*.example",
        "https://chat.example:443",
        "http://chat.example:80",
        "https://user@chat.example",
        "https://chät.example",
        "https://chat.example https://two.example",
    ],
)
def test_only_valid_browser_origins_can_be_listed(origin: str, model: Path) -> None:
    with pytest.raises(StartupError, match="allowed_origins names '.*; an origin is what browsers"):
        Config(model=model, allowed_origins=f"{LISTED},{origin}").checked()
    for good in ("http://[::1]:3000", "https://chat.example:8443", "vscode-webview://1a2b", APP):
        assert Config(model=model, allowed_origins=good).checked().origins == (good,)
