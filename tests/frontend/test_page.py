"""The route of the built-in page: what its reply says to a browser, and that the page asks for
metrics that exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
from prometheus_client import Metric

from tests.frontend.live_server import LiveServer, live_server
from tlt_server.frontend.dialects.page import PAGE
from tlt_server.metrics import Metrics

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}


def test_the_page_is_the_file_and_may_not_be_framed_sniffed_or_extended(server: LiveServer) -> None:
    reply = httpx.get(f"{server.url}/")
    assert (
        reply.content == PAGE.read_bytes()
        and reply.headers["content-type"] == "text/html; charset=utf-8"
    )
    policy = dict(
        rule.split(" ", 1) for rule in reply.headers["content-security-policy"].split("; ")
    )
    assert policy.pop("script-src").startswith("'sha256-") and policy.pop("style-src").startswith(
        "'sha256-"
    )
    assert policy == {
        "default-src": "'none'",
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert (reply.headers["x-content-type-options"], reply.headers["referrer-policy"]) == (
        "nosniff",
        "no-referrer",
    )


def test_a_browser_that_has_the_page_gets_304(server: LiveServer) -> None:
    first = httpx.get(f"{server.url}/")
    assert first.headers["cache-control"] == "no-cache"
    for known, status in (
        (first.headers["etag"], 304),
        (f'"other", W/{first.headers["etag"]}', 304),
        ('"other"', 200),
    ):
        assert httpx.get(f"{server.url}/", headers={"if-none-match": known}).status_code == status
    assert httpx.head(f"{server.url}/").headers["etag"] == first.headers["etag"]


def test_the_page_needs_no_key_and_is_the_same_with_one(model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("the-key")
    with live_server(model, api_key_file=tmp_path / "keys") as server:
        assert httpx.get(f"{server.url}/").content == PAGE.read_bytes()
        assert httpx.post(f"{server.url}/").status_code == 405
        for path in ("/metrics", "/server_info", "/strategy", "//", "/index.html"):
            assert httpx.get(f"{server.url}{path}").status_code == 401


def test_the_page_names_no_other_host(server: LiveServer) -> None:
    addresses = set(
        re.findall(r"\w+://[^\s'\"]+|(?:src|href)=\S+", httpx.get(f"{server.url}/").text)
    )
    assert addresses == {
        "http://www.w3.org/2000/svg",
        'href="data:image/svg+xml,%3Csvg',
    }  # names of a namespace, and the icon


def test_the_document_describes_the_page(server: LiveServer) -> None:
    about = httpx.get(f"{server.url}/openapi.json").json()["paths"]["/"]["get"]
    assert list(about["responses"]["200"]["content"]) == ["text/html"] and about["summary"]


def test_every_metric_it_reads_exists() -> None:
    named = set(re.findall(r'"(tlt_\w+)"', PAGE.read_text()))
    assert len(named) >= 16 and named <= set(_series(Metrics().registry.collect()))


def _series(families: Iterator[Metric]) -> Iterator[str]:
    for family in families:
        yield from (family.name + suffix for suffix in SUFFIXES.get(family.type, ("",)))
