"""No request waits for a compiler, nor for a kernel to be loaded, which can wait for all that the
GPU does: a broadcast, say.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("drafter", "max_running", "least"), [("history", "16", 70), ("eagle", "24", 140)]
)
def test_every_kernel_variant_that_default_steps_launch_is_loaded_at_start(
    drafter: str, max_running: str, least: int
) -> None:
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.engine.kernel_variants", drafter, max_running, "bfloat16"],
        env=compiling,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["at_start"] > least and told["later"] == []
