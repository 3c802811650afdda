"""The clock of the benches: it measures the GPU's work, not the host's launches."""

from __future__ import annotations

import time

import pytest
import torch

from tlt_server.bench.micro import captured, in_turns

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_clock_counts_the_gpu_without_the_host() -> None:
    def spin(cycles: int) -> float:
        def run() -> None:
            torch.cuda._sleep(cycles)
            time.sleep(0.01)

        # The least: turns of other processes on this GPU can only add to it.
        return min(in_turns({"it": captured(run)}, 1)["it"] for _ in range(10))

    # One to six milliseconds, as the clock is: less than the host sleeps.
    short, long = spin(2_000_000), spin(8_000_000)
    assert long > 2 * short and 0.5 < short < 10
