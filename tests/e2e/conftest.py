"""One real `tlt serve` with the shipped pair for the whole session; `tests/conftest.py` gives all of these tests to one worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tlt_client import Client
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import DRAFTER, TARGET

PAIR = ("--model", str(TARGET), "--drafter", str(DRAFTER))


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*PAIR) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.url, timeout_s=60) as client:
        yield client
