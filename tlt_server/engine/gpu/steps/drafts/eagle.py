"""EAGLE on the device: a best-first tree, grown with the noise that the target will sample with;
all depths in one graph.

Branches of history are grafted as part of its pass, with acceptance probabilities learned from
verification (CPU twin: `speculation/branches.py`). One calibration table has the drafter's cells,
then those of branches, so one launch counts a verified pass.

Its KV is always kept: every extend pass also fuses the features of its rows and writes the
drafter's keys and values to the rows' KV slots, so speculation turns on without catching up.
Legend: R rows, G gap edges, H hidden, F features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_kernels.gpu.branches import MATCHES, columns, graft
from tlt_kernels.gpu.calibration import calibrate
from tlt_kernels.gpu.gather import previous_hints
from tlt_kernels.gpu.history import workspace
from tlt_kernels.gpu.kept import commit_kv, store_hints
from tlt_kernels.gpu.tensors import CalibrationTable, KeptRows, Nodes, RowTable, Trees
from tlt_server.engine.gpu.steps.drafts import DraftKey, NetworkStorage, index_of
from tlt_server.engine.gpu.steps.drafts.tables import DeviceTable, Drift
from tlt_server.engine.gpu.steps.state import DeviceState
from tlt_server.models import Forward
from tlt_server.models.gpu.draft_tree import DraftTrees
from tlt_server.models.gpu.eagle import GpuEagleNetwork
from tlt_server.models.gpu.layers import RowTensors
from tlt_server.models.gpu.swapping import swap_networks
from tlt_server.speculation.branches import FLOOR, LEFTS, SOURCE, branches_of, prior
from tlt_server.speculation.calibration import Calibration as OnlineTable
from tlt_server.weights.parts import Drafter


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


class EagleDrafts:
    def __init__(self, state: DeviceState, storage: NetworkStorage) -> None:
        network, table = _of(storage.drafter)
        self.name = storage.name
        self.state, self.network, self.cache, self.attention = (
            state,
            network,
            storage.cache,
            storage.attention,
        )
        self.page_hint_PH = storage.page_hint_PH
        self.branches = Branches(state, table.acceptance_K)
        self.calibration = self.branches.own
        self.in_force = self.calibration  # by which trees are grown
        if storage.held:
            own_Z = self.calibration.acceptance_Z.clone()
            self.in_force = self.calibration._replace(acceptance_Z=own_Z)
        self._drift = Drift(self.calibration)
        self.gap_edge_G = torch.tensor(table.gap_edges, device=state.upload_U.device)

    @classmethod
    def make(cls, state: DeviceState, storage: NetworkStorage | None) -> EagleDrafts:
        assert storage is not None, "a ladder names it only where a network was loaded"
        return cls(state, storage)

    def tables(self, stream: torch.cuda.Stream | None) -> dict[str, DeviceTable]:
        return {
            self.name: DeviceTable(
                self.calibration, stream, self.gap_edge_G, self.in_force.acceptance_Z
            ),
            branches_of(self.name): DeviceTable(self.branches.calibration, stream),
        }

    def install(self, changed: Drafter) -> None:
        """Swap the values with the live ones. The new table has its own buckets."""
        network, table = _of(changed)
        swap_networks(self.network, network)
        own = self.network.originals
        self.network.originals, network.originals = network.originals, own
        self.network = network
        self.begin_again(table.gap_edges, table.acceptance_K)

    def begin_again(self, edge_G: NDArray[np.float32], acceptance_K: NDArray[np.float32]) -> None:
        """Start with a new table, without observations."""
        self.gap_edge_G.copy_(torch.from_numpy(edge_G))
        fresh = CalibrationTable.of(torch.from_numpy(acceptance_K))
        for mine, value in zip(self.calibration, fresh, strict=True):
            mine.copy_(value)
        self.in_force.acceptance_Z.copy_(self.calibration.acceptance_Z)

    def draft_pass(self, key: DraftKey) -> EaglePass:
        return EaglePass(key, self)

    def read_rows(self, rows: RowTable, kept: KeptRows, forwarded: Forward) -> None:
        batch_slots = self.state.batch_slots
        g_RH = self.network.fuse(forwarded.features_RF)
        previous_RH = previous_hints(g_RH, rows, batch_slots)
        self.network.store(
            RowTensors(rows.token_R, rows.position_R, rows.kv_slot_R), previous_RH, self.cache
        )
        commit_kv(kept, self.cache.k, self.cache.v)
        store_hints(kept, g_RH, batch_slots, self.page_hint_PH)

    def observe(
        self, trees: Trees, kept: KeptRows, nodes: Nodes, rows: RowTable, decode_rows: int
    ) -> None:
        calibrate(trees, kept, nodes, rows, self.branches.table, decode_rows=decode_rows)
        self._drift.observed()
        self.branches.observed()

    def gauges(self) -> Mapping[str, float]:
        return {"calibration_drift": self._drift.value, **self.branches.gauges()}


def _of(drafter: Drafter) -> tuple[GpuEagleNetwork, OnlineTable]:
    table = drafter.calibration
    assert isinstance(table, OnlineTable)
    return cast(GpuEagleNetwork, drafter.network), table  # made by this drafter's loader


class EaglePass:
    def __init__(self, key: DraftKey, drafts: EagleDrafts) -> None:
        self.key, self._drafts = key, drafts
        self._trees = DraftTrees(
            drafts.attention,
            key.batch,
            key.depth,
            key.width,
            columns=columns(key.depth, key.width),
            device=drafts.state.upload_U.device.type,
        )
        self.nodes, self.own_columns = self._trees.nodes, self._trees.own_columns
        self._match_BJW = drafts.branches.workspace(key)

    def run(self) -> None:
        key, drafts = self.key, self._drafts
        state = drafts.state
        self._trees.grow(
            drafts.network,
            drafts.cache,
            state.batch_slot_B(key.batch),
            state.batch_slots,
            drafts.in_force,
            drafts.gap_edge_G,
            drafter=index_of(key.drafter),
            trash=state.kv_slots.trash,
            first_kv_slot=state.kv_slots.tree_start,
        )
        drafts.branches.graft(key, self.nodes, self._match_BJW)
