"""Two real servers with the shipped pair for each of xdist's workers, one of which takes weights;
and a browser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

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


@pytest.fixture(
    scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)], ids="width {}".format
)
def width(request: pytest.FixtureRequest) -> int:
    """Return how many ranks share the target of the module's server."""
    found: int = request.param
    return found


@pytest.fixture(scope="module")
def of_width(width: int) -> tuple[str, ...]:
    """Return the flags of a server of this width."""
    return ("--device", "cpu", "--tensor-parallel", str(width))


@contextmanager
def taking_weights(directory: Path, *flags: str) -> Iterator[ServerProcess]:
    """Start a server that drafts and takes weights by every channel."""
    places = ("--weight-root", str(directory / "weights"), "--state-dir", str(directory / "state"))
    channels = ("--weight-channels", "disk,http,broadcast,ipc", "--weight-timeout-s", "60")
    channels += ("--grpc-port", "0")
    (directory / "weights").mkdir()
    with ServerProcess(*DRAFTING, *flags, *places, *channels) as running:
        yield running


@pytest.fixture(scope="session")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with taking_weights(tmp_path_factory.mktemp("pushed")) as running:
        yield running


@pytest.fixture(scope="module")
def pushable(
    width: int,
    of_width: tuple[str, ...],
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ServerProcess]:
    """Yield the worker's server that takes weights, with those of the start; for two ranks another
    of the file's own.
    """
    if width > 1:
        with taking_weights(tmp_path_factory.mktemp("pushable"), *of_width) as running:
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
