import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from tests.frontend.live_server import LiveServer, serving
from tests.frontend.tiny_model import write_model
from tlt_client import Client

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


server = serving()


@pytest.fixture
def client(server: LiveServer) -> Iterator[Client]:
    with Client(server.url, timeout_s=20) as client:
        yield client
