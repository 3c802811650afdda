"""Two real servers with the shipped pair for each of xdist's workers, one of which takes weights;
and a browser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.e2e.fleets import fleet, ready
from tests.mostly_long import mostly_long
from tests.waiting import until
from tlt_client import Client
from tlt_client.channels.http import HttpSender
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import DRAFTER, TARGET

if TYPE_CHECKING:  # a machine without a browser runs the tests that need none
    from playwright.sync_api import Browser, Page

    from tests.e2e.browser import Open

PAIR = ("--model", str(TARGET), "--drafter", str(DRAFTER))
# Starts 2 s sooner than the default policy, which measures steps first.
DRAFTING = (*PAIR, "--policy", "fixed", "--sd-strategy", "eagle:4x2x8")


@pytest.fixture(scope="session")
def shipped() -> Iterator[ServerProcess]:
    with ServerProcess(*PAIR) as running:
        yield running


@pytest.fixture(scope="module")
def server(shipped: ServerProcess) -> ServerProcess:
    """Return the worker's server, whose policy each file may change, with its policy at start."""
    with Client(shipped.url, timeout_s=60) as client:
        client.set_strategy("goodput")
    return shipped


class Served(NamedTuple):
    """Ranks of a server, and servers."""

    ranks: int = 1
    replicas: int = 1


KINDS = {"one": Served(), "two ranks": Served(ranks=2), "fleet": Served(replicas=2)}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "served" in metafunc.fixturenames:
        on_fleet = metafunc.definition.get_closest_marker("fleet") is not None
        kinds = [kind for kind in KINDS if on_fleet or kind != "fleet"]
        metafunc.parametrize("served", mostly_long(kinds, "one"), indirect=True, scope="module")


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Served:
    """Return what the module's server that takes weights is."""
    return KINDS[request.param]


@pytest.fixture(scope="module")
def of_width(served: Served) -> tuple[str, ...]:
    """Return the flags of a server of this width."""
    return ("--device", "cpu", "--tensor-parallel", str(served.ranks))


@contextmanager
def taking_weights(directory: Path, *flags: str, replicas: int = 1) -> Iterator[ServerProcess]:
    """Start a server that drafts and takes weights by every channel, or a fleet of such."""
    state, root, grpc = directory / "state", directory / "weights", ("--grpc-port", "0")
    root.mkdir()
    flags = (*DRAFTING, *flags, "--weight-root", str(root), "--weight-timeout-s", "60")
    if replicas > 1:
        flags += ("--weight-channels", "disk,http,broadcast")
        with fleet(state, *flags, replicas=replicas, own=grpc) as running:
            with Client(running.url, timeout_s=60) as client:
                ready(client, replicas)
            yield running
        return
    flags += ("--state-dir", str(state), "--weight-channels", "disk,http,broadcast,ipc")
    with ServerProcess(*flags, *grpc) as running:
        yield running


@pytest.fixture(scope="session")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with taking_weights(tmp_path_factory.mktemp("pushed")) as running:
        yield running


@pytest.fixture(scope="module")
def pushable(
    served: Served,
    of_width: tuple[str, ...],
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ServerProcess]:
    """Yield the worker's server that takes weights, with those of the start; for two ranks, or a
    fleet, another of the file's own.
    """
    if served != Served():
        place = tmp_path_factory.mktemp("pushable")
        with taking_weights(place, *of_width, replicas=served.replicas) as running:
            yield running
        return
    running = request.getfixturevalue("pushed")
    with Client(running.url, timeout_s=60) as client:
        client.set_strategy("fixed", "eagle:4x2x8")
        if client.weights()["open"]:  # a test of a push that never ends
            client.abort_weights()
            until(lambda: not client.weights()["open"])
        for group in client.weights()["groups"]:
            client.leave_group(group)
        for role, directory in (("target", TARGET), ("drafter", DRAFTER)):
            HttpSender(client).push_directory(directory, "initial", role=role)
    yield running


@pytest.fixture(scope="module")
def weight_root(pushable: ServerProcess) -> Path:
    with Client(pushable.url) as client:
        return Path(client.server_info()["config"]["weight_root"])


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.url, timeout_s=60) as client:
        yield client


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Run Chromium for one module, because other modules run asyncio loops of their own."""
    from tests.e2e.browser import browser as open_browser

    with open_browser() as running:
        yield running


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Return a function that opens a page with storage of its own.

    At the end no script may have failed, and no other origin may have been asked.
    """
    contexts: list[Any] = []
    wrong: list[str] = []

    def opened(
        url: str,
        *,
        width: int = 1280,
        quiet: bool = True,
        before: Callable[[Page], None] = lambda page: None,
        **options: Any,
    ) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "request",
            lambda asked: (
                None if asked.url.startswith((f"{url}/", "data:")) else wrong.append(asked.url)
            ),
        )
        if quiet:
            page.on("console", lambda message: wrong.append(message.text))
        before(page)
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []
