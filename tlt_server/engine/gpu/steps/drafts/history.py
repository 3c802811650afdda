"""Drafting without a model, on the device: continuations of earlier occurrences of a request's last
tokens, in its text and in its siblings'.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from tlt_kernels.gpu.calibration import calibrate
from tlt_kernels.gpu.history import history_nodes, workspace
from tlt_kernels.gpu.tensors import CalibrationTable, KeptRows, Nodes, RowTable, Trees
from tlt_server.engine.gpu.steps.drafts import DraftKey, NetworkStorage, index_of
from tlt_server.engine.gpu.steps.drafts.tables import DeviceTable, Drift
from tlt_server.engine.gpu.steps.state import DeviceState
from tlt_server.models import Forward
from tlt_server.speculation.drafters.history import prior
from tlt_server.weights.parts import Drafter


class HistoryDrafts:
    network = None

    def __init__(self, state: DeviceState) -> None:
        self.state, self.calibration = (
            state,
            CalibrationTable.of(torch.tensor(prior(), device=state.upload_U.device)),
        )
        self._drift = Drift(self.calibration)

    @classmethod
    def make(cls, state: DeviceState, storage: NetworkStorage | None) -> HistoryDrafts:
        return cls(state)

    def tables(self, stream: torch.cuda.Stream | None) -> dict[str, DeviceTable]:
        return {"history": DeviceTable(self.calibration, stream)}

    def install(self, changed: Drafter) -> None:
        """Do nothing: this drafter has no network."""

    def begin_again(self, edge_G: NDArray[np.float32], acceptance_K: NDArray[np.float32]) -> None:
        """Do nothing: this drafter has no network."""

    def draft_pass(self, key: DraftKey) -> HistoryPass:
        return HistoryPass(key, self)

    def read_rows(self, rows: RowTable, kept: KeptRows, forwarded: Forward) -> None:
        """Do nothing: it reads only the texts of the batch slots."""

    def observe(
        self, trees: Trees, kept: KeptRows, nodes: Nodes, rows: RowTable, decode_rows: int
    ) -> None:
        calibrate(trees, kept, nodes, rows, self.calibration, decode_rows=decode_rows)
        self._drift.observed()

    def gauges(self) -> Mapping[str, float]:
        return {"history_table_drift": self._drift.value}


class HistoryPass:
    def __init__(self, key: DraftKey, drafts: HistoryDrafts) -> None:
        self.key, self._drafts = key, drafts
        device = drafts.state.upload_U.device.type
        self.own_columns = key.depth * key.width
        self.nodes = Nodes.allocate(key.batch, self.own_columns, device=device)
        self._match_BJW = workspace(key.batch, key.width, drafts.state.batch_slots)

    def run(self) -> None:
        key, state = self.key, self._drafts.state
        history_nodes(
            state.batch_slot_B(key.batch),
            state.batch_slots,
            self.nodes,
            self._drafts.calibration,
            self._match_BJW,
            depth=key.depth,
            width=key.width,
            drafter=index_of(key.drafter),
        )
