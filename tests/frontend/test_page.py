"""The route of the built-in page: what its reply says to a browser, and that the page asks for
metrics that exist.
"""

import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import Metric

from tests.frontend.live_server import LiveServer, live_server
from tlt_server.frontend.dialects.page import PAGE
from tlt_server.metrics import Metrics

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}


def test_the_page_has_a_strict_content_policy(server: LiveServer) -> None:
    reply = httpx.get(f"{server.url}/")
    assert reply.content == PAGE.read_bytes()
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        rule.split(" ", 1) for rule in reply.headers["content-security-policy"].split("; ")
    )
    assert policy.pop("script-src").startswith("'sha256-")
    assert policy.pop("style-src").startswith("'sha256-")
    assert policy == {
        "default-src": "'none'",
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["referrer-policy"] == "no-referrer"


def test_a_browser_with_the_page_gets_304(server: LiveServer) -> None:
    first = httpx.get(f"{server.url}/")
    assert first.headers["cache-control"] == "no-cache"
    for known, status in (
        (first.headers["etag"], 304),
        (f'"other", W/{first.headers["etag"]}', 304),
        ('"other"', 200),
    ):
        assert httpx.get(f"{server.url}/", headers={"if-none-match": known}).status_code == status
    assert httpx.head(f"{server.url}/").headers["etag"] == first.headers["etag"]


def test_page_needs_no_key_and_is_identical_with_a_key(model: Path) -> None:
    with live_server(model, keys="the-key") as server:
        assert httpx.get(f"{server.url}/").content == PAGE.read_bytes()
        assert httpx.post(f"{server.url}/").status_code == 405
        for path in ("/metrics", "/server_info", "/strategy", "/index.html"):
            assert httpx.get(f"{server.url}{path}").status_code == 401


def test_the_page_names_no_other_host(server: LiveServer) -> None:
    addresses = set(
        re.findall(r"\w+://[^\s'\"]+|(?:src|href)=\S+", httpx.get(f"{server.url}/").text)
    )
    assert addresses == {
        "http://www.w3.org/2000/svg",
        'href="data:image/svg+xml,%3Csvg',
    }  # names of a namespace, and the icon


def test_openapi_document_describes_the_page(server: LiveServer) -> None:
    about = httpx.get(f"{server.url}/openapi.json").json()["paths"]["/"]["get"]
    assert list(about["responses"]["200"]["content"]) == ["text/html"] and about["summary"]


def test_every_metric_of_the_page_exists() -> None:
    named = set(re.findall(r'"(tlt_\w+)"', PAGE.read_text()))
    metrics = Metrics()
    metrics.fleet.watch(lambda: [])
    assert len(named) >= 16 and named <= set(_series(metrics.registry.collect()))


def _series(families: Iterator[Metric]) -> Iterator[str]:
    for family in families:
        yield from (family.name + suffix for suffix in SUFFIXES.get(family.type, ("",)))


# Machado, Oliveira and Fernandes (2009): what is left of linear RGB without one kind of cones.
SIGHTS = {
    "all cones": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "no long": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "no medium": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "no short": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}
OKLAB = (
    ((0.4122, 0.5363, 0.0514), (0.2119, 0.6807, 0.1074), (0.0883, 0.2817, 0.6300)),
    ((0.2105, 0.7936, -0.0041), (1.9780, -2.4286, 0.4506), (0.0259, 0.7828, -0.8087)),
)
Colour = tuple[float, ...]


def linear(colour: str) -> Colour:
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return tuple(v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)


def times(matrix: tuple[Colour, ...], colour: Colour) -> Colour:
    return tuple(sum(a * b for a, b in zip(row, colour, strict=True)) for row in matrix)


def seen(colour: Colour, sight: str) -> Colour:
    """Return a colour in OKLab, where distances are those that one sees."""
    left = tuple(min(1.0, max(0.0, part)) for part in times(SIGHTS[sight], colour))
    return times(OKLAB[1], tuple(part ** (1 / 3) for part in times(OKLAB[0], left)))


def luminance(colour: Colour) -> float:
    return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), colour, strict=True))


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_eight_hues_and_grey_differ_under_color_blindness(theme: int) -> None:
    found = re.findall(r"--(s\d|surface): light-dark\((#\w{6}), (#\w{6})\)", PAGE.read_text())
    colours = {name: linear(pair[theme]) for name, *pair in found}
    surface = luminance(colours.pop("surface"))
    assert [*colours] == [f"s{at}" for at in range(9)]
    for name, colour in colours.items():
        low, high = sorted((surface, luminance(colour)))
        assert name == "s0" or (high + 0.05) / (low + 0.05) >= 3, name  # WCAG 1.4.11
    for sight in SIGHTS:
        for one, other in itertools.combinations(colours, 2):
            apart = math.dist(seen(colours[one], sight), seen(colours[other], sight))
            assert apart > 0.09, (sight, one, other)  # 0.02 can just be seen


def test_hues_patterns_and_lines_repeat_late() -> None:
    """Counts without a common divisor give every pair once before one comes again."""
    text = PAGE.read_text()
    (counts,) = re.findall(r"const HUES = (\d+), PATTERNS = (\d+), LINES = (\d+);", text)
    hues, patterns, lines = map(int, counts)
    assert math.gcd(hues, patterns) == math.gcd(hues, lines) == 1
    assert {*re.findall(r"\.hue(\d)", text)} == {str(at) for at in range(hues + 1)}
    assert len(re.findall(r'<pattern id="h\d"', text)) == patterns - 1
    assert {*re.findall(r"u\.line(\d)", text)} == {str(at) for at in range(1, lines)}
