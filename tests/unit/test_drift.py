"""The drift of a device's table is read every so often, is the host's formula, and is known only
once the reading has arrived.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tlt_kernels.gpu.tensors import CalibrationTable
from tlt_server.engine.gpu.steps.drafts.drift import EVERY, Drift
from tlt_server.speculation.calibration import OnlineTable


class Later:
    """An event that passes when the test says so."""

    passed = False

    def record(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


def test_reading_matches_the_host_table_without_waiting() -> None:
    host = OnlineTable(np.linspace(0.1, 0.9, 7, dtype=np.float32))
    table = CalibrationTable.of(torch.from_numpy(host.prior_K))
    drift: Any = Drift(table)
    drift._event = Later()
    host.acceptance_K[:] = [0.2, 0.1, 0.5, 0.4, 0.9, 0.8, 0.7]
    host.trials_K[:] = [3, 0, 10, 1, 0, 7, 2]
    table.acceptance_Z.copy_(torch.from_numpy(host.acceptance_K))
    table.trials_Z.copy_(torch.from_numpy(host.trials_K))
    for _ in range(EVERY - 1):
        drift.observed()
    drift._event.passed = True
    assert drift.value == 0.0, "nothing has been read"
    drift.observed()
    assert drift.value == 0.0, "it is on its way"
    drift._event.passed = True
    assert abs(drift.value - host.drift) < 1e-6 and host.drift > 0.01


def test_a_table_that_has_seen_nothing_has_not_moved() -> None:
    drift = Drift(CalibrationTable.of(torch.full((5,), 0.5)))
    for _ in range(EVERY):
        drift.observed()
    assert drift.value == 0.0
