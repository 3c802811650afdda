"""One real `tlt serve` with the shipped pair for the whole session; under xdist all of these tests run in one worker, to share it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tlt_client import Client
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import DRAFTER, TARGET

PAIR = ("--model", str(TARGET), "--drafter", str(DRAFTER))


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("e2e"))


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*PAIR) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.url, timeout_s=60) as client:
        yield client
