"""No step of a real GPU loads a kernel, whichever strategy is set while it serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("policy", ["off", "goodput"])
def test_no_step_loads_a_kernel_of_a_strategy_that_was_set(policy: str) -> None:
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.engine.strategies_on_gpu", policy, "cuda"],
        env=compiling,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert len(told["strategies"]) == 10 and told["loaded_in_steps"] == []
    assert all(each["same"] for each in told["strategies"].values())
    assert any("compiled for it" in each["said"] for each in told["strategies"].values())
    prepared = [each for each in told["strategies"].values() if "compiled for it" in each["said"]]
    assert all(each["steps"] > 1 for each in prepared), "steps go on while kernels are compiled"
