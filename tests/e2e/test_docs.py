"""The pages under docs are what runs: their `python` blocks, and their `bash` blocks line by line,
against a real server.

Every route has one. Python's blocks run in this process, which has imported torch once; each has
names of its own and an empty directory.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import PAIR
from tlt_server.demo.push import perturbed_copy
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import TARGET

DOCS = Path(__file__).parents[2] / "docs"
README = DOCS.parent / "README.md"
ADDRESS, GRPC_ADDRESS = "http://127.0.0.1:8000", "127.0.0.1:8001"
COMMANDS = [
    pytest.param(
        language,
        block,
        "fp8_server" if page.stem == "fp8" else "server",
        id=f"{page.stem}-{place}-{language}",
    )
    for page in sorted(DOCS.glob("*.md"))
    for place, (language, text) in enumerate(
        re.findall(r"^```(python|bash)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    )
    for block in ([text] if language == "python" else text.strip().splitlines())
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Serve as docs/trainers.md says; its blocks run in order."""
    directory = tmp_path_factory.mktemp("docs")
    for seed, name in enumerate(("step-1", "step-2")):
        perturbed_copy(TARGET, directory / "weights" / name, seed)
    with ServerProcess(
        *PAIR,
        *("--weight-root", str(directory / "weights")),
        *("--state-dir", str(directory / "state"), "--drafter-training", "idle"),
        *("--drafter-feature-mb", "64", "--weight-channels", "disk,http,broadcast,ipc"),
        *("--max-loras", "2", "--grpc-port", "0"),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def fp8_server() -> Iterator[ServerProcess]:
    """Serve as docs/fp8.md says."""
    with ServerProcess(*PAIR, "--quantization", "fp8", "--weight-channels", "ipc") as running:
        yield running


@pytest.mark.parametrize(("language", "block", "which"), COMMANDS)
def test_every_documented_example_runs(
    language: str,
    block: str,
    which: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    server: ServerProcess = request.getfixturevalue(which)
    text = block.replace(ADDRESS, server.url).replace(GRPC_ADDRESS, server.grpc_address)
    monkeypatch.chdir(tmp_path)
    if language == "python":
        exec(compile(text, "example", "exec"), {"__name__": "__main__"})
    else:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            timeout=200,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert done.returncode == 0, capfd.readouterr().err
    said = capfd.readouterr().out
    assert said and not re.search(r'^(data: )?{"error"', said, re.MULTILINE), said


RECORDED = {  # other names of routes with an example; recorded calls test them
    *("/areal_pause_generation", "/areal_continue_generation", "/areal_update_weights"),
    *("/areal_init_weights_update_group", "/areal_set_update_weight_meta"),
    *("/areal_update_weights_xccl", "/v1/models/{name}", "/v1/tokenize", "/v1/detokenize"),
    *("/tokenizer_info", "/release_memory_occupation", "/resume_memory_occupation"),
    *("/inference/v1/abort_requests", "/reset_encoder_cache", "/reset_mm_cache"),
    *("/release_kv_cache_memory", "/shutdown_weight_transfer_engine"),
}


def test_every_route_has_an_example(server: ServerProcess) -> None:
    """Each route of `/openapi.json` is called with `curl` or with httpx in a block that runs, or by
    a trainer's half there, or is one that other engines' clients know (`RECORDED`).
    """
    asked = (
        {("POST", "/weight_groups")}
        if any("BroadcastSender(client)" in command.values[1] for command in COMMANDS)
        else set()
    )
    for command in COMMANDS:
        asked |= {
            (method.upper(), path)
            for method, path in re.findall(r'http\.(\w+)\(f?"(/[^"]*)"', command.values[1])
        }  # type: ignore[index]
    for command in (
        line
        for page in [*DOCS.glob("*.md"), README]
        for line in page.read_text().splitlines()
        if line.startswith("curl ")
    ):
        method = re.search(r"-X (\w+)", command)
        path = command.split(ADDRESS)[1].split()[0].partition("?")[0].strip("\"'") or "/"
        asked.add((method[1] if method else "POST" if " -d " in command else "GET", path))
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    routes = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    pattern = {path: re.compile(re.sub(r"{\w+}", "[^/]+", path)) for path in paths}
    missing = [
        f"{method} {path}"
        for method, path in routes
        if path not in RECORDED
        and not any(m == method and pattern[path].fullmatch(p) for m, p in asked)
    ]
    assert len(routes) > 20 and not missing, missing
