"""No request waits for a compiler, nor for a kernel to be loaded, which can wait for all that the
GPU does: a broadcast, say.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def variants(*arguments: str) -> dict[str, Any]:
    """Return what `kernel_variants` tells: of the start, then of each policy that is set."""
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.engine.kernel_variants", *arguments],
        env=compiling,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    told: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return told


@pytest.mark.parametrize(
    ("drafter", "max_running", "max_loras", "least"),
    [
        ("eagle", "1", "1", 120),
        pytest.param("history", "16", "2", 90, marks=pytest.mark.long),
        pytest.param("eagle", "12", "0", 130, marks=pytest.mark.long),
    ],
)
def test_kernel_variants_of_default_steps_are_loaded_at_start(
    drafter: str, max_running: str, max_loras: str, least: int
) -> None:
    told = variants(drafter, "goodput", max_running, max_loras, "none")["start"]
    assert told["ready"] > least and told["lacks"] == []


@pytest.mark.parametrize(
    ("policy", "max_running", "max_loras", "sets"),
    [
        ("off", "1", "0", "few"),
        pytest.param("off", "7", "1", "many", marks=pytest.mark.long),
        pytest.param("goodput", "7", "0", "many", marks=pytest.mark.long),
    ],
)
def test_active_policy_lacks_no_kernel_variant(
    policy: str, max_running: str, max_loras: str, sets: str
) -> None:
    start, *asked = variants("eagle", policy, max_running, max_loras, sets).values()
    assert start["lacks"] == [] and len(asked) > 5
    assert sum(each["ready"] for each in asked) > 20, "the start has prepared all of them"
    assert [each["lacks"] for each in asked] == [[]] * len(asked)
    assert not any(each["again"] for each in asked)


@pytest.mark.long
def test_kernels_are_compiled_elsewhere_and_loaded_before_launch(tmp_path: Path) -> None:
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
    assert sorted(reported) == [[i, "", False] for i in (2, 3, 5)], "the others ended their workers"
