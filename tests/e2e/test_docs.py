"""The pages under docs are what runs: their `python` blocks, and their `bash` blocks line by line, against a real server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tlt_server.demo.server import ServerProcess

DOCS = Path(__file__).parents[2] / "docs"
ADDRESS = "http://127.0.0.1:8000"
COMMANDS = [
    pytest.param([sys.executable, "-c", block] if language == "python" else ["bash", "-euo", "pipefail", "-c", block],
                 id=f"{page.stem}-{place}-{language}")
    for page in sorted(DOCS.glob("*.md"))
    for place, (language, text) in enumerate(re.findall(r"^```(python|bash)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))
    for block in ([text] if language == "python" else text.strip().splitlines())
]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_example_runs(command: list[str], server: ServerProcess, tmp_path: Path) -> None:
    assert ADDRESS in command[-1]
    done = subprocess.run([*command[:-1], command[-1].replace(ADDRESS, server.url)], cwd=tmp_path, timeout=60, capture_output=True,
                          text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr
    assert done.stdout and not re.search(r'^(data: )?{"error"', done.stdout, re.MULTILINE), done.stdout
