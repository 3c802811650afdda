"""No request waits for a compiler, nor for a kernel to be loaded, which can wait for all that the
GPU does: a broadcast, say.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("drafter", "max_running", "max_loras", "least"),
    [
        ("eagle", "1", "1", 120),
        pytest.param("history", "16", "2", 90, marks=pytest.mark.long),
        pytest.param("eagle", "12", "0", 130, marks=pytest.mark.long),
    ],
)
def test_every_kernel_variant_that_default_steps_launch_is_loaded_at_start(
    drafter: str, max_running: str, max_loras: str, least: int
) -> None:
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "tests.engine.kernel_variants"),
            *(drafter, max_running, max_loras, "bfloat16"),
        ],
        env=compiling,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["at_start"] > least and told["later"] == []


@pytest.mark.long
def test_kernels_are_compiled_in_other_processes_and_loaded_before_a_launch(tmp_path: Path) -> None:
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.engine.compiled_ahead"],
        env={**compiling, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    (refused, starts), *reported = map(json.loads, ran.stdout.splitlines())
    assert refused == "_gather", "a capture must not load a kernel"
    rows = [
        [each[name] for name in ("start", "rehearsals", "compiled", "hits", "brought")]
        for each in starts
    ]
    assert rows == [
        ["cold", 1, 2, [True, True], 2],
        ["later engine of this process", 1, 0, [], 2],
        ["warm", 0, 0, [True, True], 4],
        ["one is missing", 0, 2, [True, True], 6],
    ]
    assert not any(each["left"] for each in starts), "no launch loads what a start has loaded"
    assert sorted(reported) == [[2, ""], [3, ""], [5, ""]], "the others ended their workers"
