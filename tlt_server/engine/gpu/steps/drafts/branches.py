"""Branches of history in the trees of a drafter with weights: grafted as part of its pass, with
acceptance probabilities learned from verification. CPU twin: `speculation/branches.py`.

One calibration table has the drafter's cells, then those of branches, so one launch counts a
verified pass.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_kernels.gpu.branches import MATCHES, graft
from tlt_kernels.gpu.history import workspace
from tlt_kernels.gpu.tensors import CalibrationTable, Nodes
from tlt_server.engine.gpu.steps.drafts import DraftKey, index_of
from tlt_server.engine.gpu.steps.drafts.drift import Drift
from tlt_server.engine.gpu.steps.state import DeviceState
from tlt_server.speculation.branches import FLOOR, LEFTS, SOURCE, prior


class Branches:
    def __init__(self, state: DeviceState, own_K: NDArray[np.float32]) -> None:
        """own_K: the drafter's table."""
        self._state, self._first_cell = state, len(own_K)
        both_Z = torch.from_numpy(np.concatenate((own_K, prior())))
        self.table = CalibrationTable.of(both_Z.to(state.upload_U.device))
        self.own = CalibrationTable._make(t[: self._first_cell] for t in self.table)
        self.calibration = CalibrationTable._make(t[self._first_cell :] for t in self.table)
        self._drift = Drift(self.calibration)

    def workspace(self, key: DraftKey) -> Tensor:
        return workspace(key.batch, MATCHES, self._state.batch_slots)

    def graft(self, key: DraftKey, nodes: Nodes, match_BJW: Tensor) -> None:
        """Append branches to the trees of a pass. match_BJW: from `workspace`."""
        graft(
            self._state.batch_slot_B(key.batch),
            self._state.batch_slots,
            nodes,
            self.table,
            match_BJW,
            depth=key.depth,
            width=key.width,
            drafters=1 << index_of(key.drafter) | 1 << index_of(SOURCE),
            first_cell=self._first_cell,
            lefts=LEFTS,
            floor=FLOOR,
        )

    def observed(self) -> None:
        """Note that the table has just learned from a pass."""
        self._drift.observed()

    def gauges(self) -> Mapping[str, float]:
        return {"branch_table_drift": self._drift.value}
