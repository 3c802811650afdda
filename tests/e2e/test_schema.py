"""The OpenAPI document against a real server: schemathesis sends every operation what its schema
allows and what it forbids.

A failure comes with a curl command; a run is the same for the same seed. `--max-examples` bounds
the work of a run; no clock does, because machines are shared.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import DRAFTING
from tests.processes import completed
from tlt_client import Client
from tlt_server.demo.rounds import look
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import TARGET

LIMITS = (
    *("--max-output-tokens", "4", "--max-n", "2", "--max-batch-items", "2"),
    *("--max-queue", "64", "--max-running", "16", "--default-timeout-s", "30"),
    *("--max-timeout-s", "30"),
)  # so that no request costs much
CHECKS = (
    *("only_deliberate_5xx", "status_code_conformance", "content_type_conformance"),
    *("response_headers_conformance", "response_schema_conformance"),
    *("negative_data_rejection", "unsupported_method", "allow_header_conformance"),
    *("ignored_auth",),
)

# A body that breaks the schema may break a limit as well, and limits are looked at first.
CONFIG = """[checks.negative_data_rejection]
expected-statuses = ["4xx", "5xx"]
"""

HALTS = (  # others then answer 503
    "^/(engine/|pause|resume|sleep|wake_up|is_|continue_|release_|areal_pause|areal_continue)"
)
ENDLESS = "^/events$"  # each reply lasts until the client gives up
REST = ("--exclude-path-regex", f"{HALTS}|{ENDLESS}")


@pytest.fixture(scope="module")
def weight_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the directory that the document's example pushes."""
    root = tmp_path_factory.mktemp("weights")
    shutil.copytree(TARGET, root / "step-7")
    return root


@pytest.fixture(scope="module")
def limited(weight_root: Path) -> Iterator[ServerProcess]:
    with ServerProcess(*DRAFTING, *LIMITS, "--weight-root", str(weight_root)) as running:
        yield running


def schemathesis(server: ServerProcess, *flags: str, timeout_s: float = 60) -> None:
    """Run the command; it must find nothing."""
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        "run",
        f"{server.url}/openapi.json",
        "--checks",
        ",".join(CHECKS),
        "--continue-on-failure",
        "--suppress-health-check",
        "all",
        "--request-timeout",
        str(timeout_s),
        "--no-color",
        "--generation-database",
        "none",
        *flags,
    ]
    environment = {
        **os.environ,
        "SCHEMATHESIS_HOOKS": "schema_hooks",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    with tempfile.TemporaryDirectory() as directory:  # it remembers failures there
        (Path(directory) / "schemathesis.toml").write_text(CONFIG)
        done = completed(command, env=environment, cwd=directory)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]


@pytest.mark.parametrize(
    "phases", ["examples,fuzzing", pytest.param("coverage,fuzzing", marks=pytest.mark.long)]
)
def test_every_operation_conforms_to_the_document(limited: ServerProcess, phases: str) -> None:
    schemathesis(limited, *REST, "--phases", phases, "--max-examples", "1", "--seed", "1")
    with Client(limited.url, timeout_s=30) as client:
        assert look(client).open == 0
        if "examples" in phases:
            pushes = client.metrics()
            assert 'result="committed"' in pushes or 'result="staged"' in pushes  # in a session
        assert client.generate([{"prompt": "2+2="}], sampling={"max_tokens": 4}).results[0].choices


@pytest.mark.long
def test_pause_and_sleep_operations_conform_to_the_document(limited: ServerProcess) -> None:
    schemathesis(
        limited,
        "--include-path-regex",
        HALTS,
        *("--phases", "coverage,fuzzing", "--max-examples", "3", "--seed", "1"),
    )
    with Client(limited.url, timeout_s=30) as client:
        for path in ("/resume", "/wake_up"):
            assert httpx.post(limited.url + path, timeout=30).status_code == 200
        assert client.generate([{"prompt": "2+2="}], sampling={"max_tokens": 4}).results[0].choices


@pytest.mark.long
def test_event_stream_conforms_to_the_document(limited: ServerProcess) -> None:
    flags = ("--phases", "coverage,fuzzing", "--max-examples", "2", "--seed", "1")
    schemathesis(limited, "--include-path-regex", ENDLESS, *flags, timeout_s=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2, 8))
def test_every_operation_conforms_to_the_document_under_fuzzing(
    limited: ServerProcess, seed: int
) -> None:
    schemathesis(
        limited, *REST, "--phases", "fuzzing", "--max-examples", "300", "--seed", str(seed)
    )


@pytest.mark.long
def test_every_operation_asks_for_a_configured_key(weight_root: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    with ServerProcess(
        *DRAFTING,
        *LIMITS,
        "--weight-root",
        str(weight_root),
        "--api-key-file",
        str(tmp_path / "keys"),
    ) as server:
        assert httpx.get(f"{server.url}/openapi.json").status_code == 401
        schemathesis(
            server,
            *REST,
            *("--header", "Authorization: Bearer secret", "--phases", "fuzzing"),
            *("--max-examples", "1", "--seed", "1"),
        )
