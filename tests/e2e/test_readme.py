"""The README is what runs: its `python` and `bash` blocks against real servers. `console` blocks
(make, pip) are not run here.

The address in the blocks is replaced by the test server's; a block that starts `tlt serve` gets a
free port, and SIGTERM once it is ready.
"""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import DRAFTING
from tests.processes import completed
from tlt_server.demo.server import ServerProcess

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
ADDRESS = "http://127.0.0.1:8000"
TIMEOUT_S = 200
TLT = """#!/bin/sh
case "$1" in serve) echo $$ > "$README_PID"; set -- "$@" --port 0;; esac
exec {python} -m tlt_server "$@"
"""


def blocks(language: str, *, serving: bool = False) -> list[str]:
    return [text for name, text in BLOCKS if name == language and ("tlt serve" in text) == serving]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(
        *DRAFTING, "--weight-root", str(tmp_path_factory.mktemp("weights"))
    ) as running:
        yield running


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Ours, with `tlt` and `python` on the path, and nothing of the checkout in the working
    directory.
    """
    for name, text in (("tlt", TLT), ("python", '#!/bin/sh\nexec {python} "$@"\n')):
        (tmp_path / name).write_text(text.format(python=sys.executable))
        (tmp_path / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "README_PID": str(tmp_path / "pid"),
    }


@pytest.mark.parametrize("block", blocks("python"))
def test_a_python_block_runs(
    block: str, server: ServerProcess, environment: dict[str, str], tmp_path: Path
) -> None:
    assert ADDRESS in block
    done = completed(
        [sys.executable, "-c", block.replace(ADDRESS, server.url)],
        cwd=tmp_path,
        env=environment,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("block", blocks("bash"))
def test_a_bash_block_runs(
    block: str, server: ServerProcess, environment: dict[str, str], tmp_path: Path
) -> None:
    assert ADDRESS in block
    for line in block.strip().splitlines():
        done = completed(
            ["bash", "-euo", "pipefail", "-c", line.replace(ADDRESS, server.url)],
            cwd=tmp_path,
            env=environment,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout and '"error"' not in done.stdout, done.stdout


@pytest.mark.parametrize("block", blocks("bash", serving=True))
def test_serving_block_becomes_ready_and_stops(
    block: str, environment: dict[str, str], tmp_path: Path
) -> None:
    said = []
    with subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as shell:
        assert shell.stderr is not None
        give_up = threading.Timer(TIMEOUT_S, os.killpg, (shell.pid, signal.SIGKILL))
        give_up.start()
        for line in shell.stderr:
            said.append(line)
            if line.startswith("tlt: ready"):
                os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
        give_up.cancel()
    assert shell.returncode == 0, "".join(said)
    assert any(line.startswith("tlt: ready") for line in said), "".join(said)


def test_readme_has_code_blocks_of_each_kind() -> None:
    assert len(blocks("python")) == 2 and len(blocks("bash")) == 1
    assert len(blocks("bash", serving=True)) == 2


def test_files_named_in_the_readme_exist() -> None:
    text = README.read_text()
    named = set(
        re.findall(
            r"`((?:tests|tlt_server|kernels|clients|docs|examples|benchmarks)/[\w/.-]*)`|\]\(([\w/.]+)\)",
            text,
        )
    )
    missing = [
        path for pair in named for path in pair if path and not (README.parent / path).exists()
    ]
    assert not missing
