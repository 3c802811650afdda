"""The environment of every test, and the order in which xdist's workers take them.

Before anything imports torch: its libraries' environment; then two torch threads, as on the
smallest machine we serve, and without a GPU Triton's CPU interpreter, which must be chosen before a
kernel is imported. Hypothesis has no deadlines, and httpx waits for 60 s instead of 5, because
machines are shared; and it draws the same examples in every run, so that a commit passes or fails
for everybody. httpx reads the certificates of the machine once, instead of 50 ms for each client.
Bytecode is always written: without it each server that a test starts compiles our sources again,
which takes 7 s of CPU instead of 3.

A worker runs whole files, so that each file's fixtures are built once; the tests of kernels share
nothing and go one by one. xdist's controller runs none, and imports none of it. The longest files
go first, so that the workers finish together.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import hypothesis
import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from httpx._transports import default as httpx_transport
from xdist import is_xdist_controller
from xdist.scheduler import LoadScopeScheduling

from tlt_server.demo.server import ServerProcess
from tlt_server.models.environment import library_environment
from tlt_server.process.faults import Containment
from tlt_server.process.garbage import loading

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.update(library_environment())
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # a peer that leaves is an error to gloo
# A background job of a shell ignores SIGINT, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
hypothesis.settings.register_profile("shared machine", deadline=None, derandomize=True)
hypothesis.settings.load_profile("shared machine")
vars(DEFAULT_TIMEOUT_CONFIG).update(connect=60.0, read=60.0, write=60.0, pool=60.0)
_new_context = httpx_transport.create_ssl_context
_context = cache(lambda certificates, **given: _new_context(**given))
httpx_transport.create_ssl_context = lambda **given: _context(
    os.environ.get("SSL_CERT_FILE"), **given
)

_stop = ServerProcess.stop


def _stop_and_look(server: ServerProcess) -> int:
    """Stop a server, and fail if it has contained a fault."""
    status = _stop(server)
    assert not [line for line in server.lines if "contained_fault" in line]
    return status


setattr(ServerProcess, "stop", _stop_and_look)  # noqa: B010 (mypy: no method may be assigned to)

LONGEST = (  # more than 20 s each
    "tests/e2e/test_spot_training.py",
    "tests/e2e/test_docs.py",
    "tests/engine/test_ranks.py",
    "tests/e2e/test_page.py",
    "tests/frontend/test_command.py",
    "tests/frontend/test_reading_process.py",
    "tests/engine/test_bench_exact.py",
    "tests/engine/test_gpu_ranks.py",
    "tests/frontend/test_large_requests.py",
    "tests/e2e/test_crashes.py",
    "tests/e2e/test_readme.py",
    "tests/engine/test_engine.py",
    "tests/e2e/test_page_looks.py",
    "tests/e2e/test_openrlhf.py",
    "tests/e2e/test_ranks.py",
    "tests/e2e/test_rollouts.py",
    "tests/e2e/test_verl.py",
    "tests/e2e/test_pushes_under_load.py",
    "tests/e2e/test_trl.py",
    "tests/e2e/test_demo.py",
    "tests/frontend/test_shutdown.py",
    "tests/engine/test_adapters.py",
    "tests/e2e/test_weights.py",
    "tests/e2e/test_drafter_training.py",
    "tests/frontend/test_streams.py",
    "tests/e2e/test_sglang.py",
    "tests/engine/test_gpu_engine.py",
    "tests/e2e/test_openai_sdk.py",
    "tests/e2e/test_broadcasts.py",
    "tests/engine/test_exact_evaluation.py",
    "tests/engine/test_weight_storage.py",
    "tests/engine/test_gpu_branches.py",
    "tests/e2e/test_schema.py",
    "tests/e2e/test_hostile.py",
    "tests/engine/test_weights.py",
    "tests/e2e/test_lifecycle.py",
    "tests/frontend/test_limits.py",
    "tests/e2e/test_grpc.py",
    "tests/e2e/test_channels.py",
    "tests/e2e/test_grpo.py",
    "tests/engine/test_kernels_at_start.py",
    "tests/unit/test_broadcast_sender.py",
    "tests/e2e/test_doctor.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the longest files to the front; all else stays in its order."""
    rank = {file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.nodeid.partition("::")[0], len(rank)))


def pytest_sessionstart(session: pytest.Session) -> None:
    if is_xdist_controller(session):
        return
    with loading():
        import torch
    torch.set_num_threads(2)
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def contained(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which a fault was contained in this process, unless it is marked
    `contains_faults`.
    """
    before = Containment.total
    yield
    if request.node.get_closest_marker("contains_faults") is None:
        assert Containment.total == before, "a fault was contained; its stack is among the output"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import tests without garbage collections, and keep what they load from every later one."""
    with loading():
        return (yield)


class ByFile(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        alone = nodeid.startswith("tests/kernels/")
        return nodeid if alone else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    config.option.loadscopereorder = False  # xdist would sort files by their number of tests
    return ByFile(config, log)
