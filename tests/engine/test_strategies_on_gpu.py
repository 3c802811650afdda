"""No step of a real GPU loads a kernel, nor records a graph of a fixed strategy, whichever is set
while it serves.
"""

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


TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize(
    ("policy", "ranks"), [("off", 1), ("goodput", 1), pytest.param("off", 2, marks=TWO)]
)
def test_no_step_loads_a_kernel_of_a_prepared_strategy(policy: str, ranks: int) -> None:
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    asked = policy, "cuda", "--ranks", str(ranks)
    ran = subprocess.run(
        [*(sys.executable, "-m", "tests.engine.strategies_on_gpu"), *asked],
        env=compiling,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert len(told["strategies"]) == 10 and told["loaded_in_steps"] == []
    assert all(each["same"] for each in told["strategies"].values())
    fixed = [each for name, each in told["strategies"].items() if name.startswith("fixed")]
    assert len(fixed) == 8 and not any(each["recorded"] for each in fixed)
    assert any("compiled for it" in each["said"] for each in told["strategies"].values())
    prepared = [each for each in told["strategies"].values() if "compiled for it" in each["said"]]
    assert all(each["steps"] > 1 for each in prepared), "steps go on while kernels are compiled"
