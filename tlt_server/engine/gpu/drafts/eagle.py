"""EAGLE on the device: a best-first tree grown with the noise the target will sample with, depth
passes in one graph.

Its KV is always kept: every extend pass also fuses the features of its rows and stores the
drafter's keys and values at the rows' own slots, so speculation turns on without any catching up.
Legend: B requests, X draft rows, M rows of a level, H hidden, F features.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from tlt_kernels.gpu import growth
from tlt_kernels.gpu.branches import columns
from tlt_kernels.gpu.calibration import calibrate
from tlt_kernels.gpu.children import children
from tlt_kernels.gpu.gather import gather, previous_hints
from tlt_kernels.gpu.growth import grow, roots
from tlt_kernels.gpu.kept import commit_kv, store_hints
from tlt_kernels.gpu.tensors import CalibrationTable, Draft, KeptRows, Nodes, RowTable, Trees
from tlt_server.engine.gpu.drafts import DraftKey, NetworkStorage, index_of
from tlt_server.engine.gpu.drafts.branches import Branches
from tlt_server.engine.gpu.drafts.drift import Drift
from tlt_server.engine.gpu.state import DeviceState
from tlt_server.models import Forward
from tlt_server.models.draft_checkpoint import Architecture, Fillable
from tlt_server.models.gpu.eagle import GpuEagleNetwork
from tlt_server.models.gpu.exchange import exchange
from tlt_server.models.gpu.layers import RowTensors
from tlt_server.models.gpu.limits import check_shape
from tlt_server.models.layers import LayerShape
from tlt_server.speculation.drafters.eagle import EagleLoader
from tlt_server.speculation.survival import Calibration as OnlineTable
from tlt_server.weights.parts import Drafter


class GpuEagleLoader(EagleLoader):
    """The `drafters.loading.Loader` of a GPU."""

    def network(self, architecture: Architecture) -> str:
        return architecture.gpu

    def check(self, network: Fillable, directory: Path) -> None:
        config = network.config
        check_shape(config, LayerShape(mlp_bias=config.mlp_bias), str(directory))
        super().check(network, directory)


class EagleDrafts:
    def __init__(self, state: DeviceState, storage: NetworkStorage) -> None:
        network, table = _of(storage.drafter)
        self.state, self.network, self.cache, self.attention = (
            state,
            network,
            storage.cache,
            storage.attention,
        )
        self.page_hint_PH = storage.page_hint_PH
        self.branches = Branches(state, table.survival_K)
        self.calibration = self.branches.own
        self._drift = Drift(self.calibration)
        self.gap_edge_G = torch.tensor(table.gap_edges, device=state.upload_U.device)

    @classmethod
    def make(cls, state: DeviceState, storage: NetworkStorage | None) -> EagleDrafts:
        assert storage is not None, "a ladder names eagle only where a network was loaded"
        return cls(state, storage)

    def install(self, changed: Drafter) -> None:
        """The values change places with those in use; of the table, over buckets of its own,
        nothing is observed yet. Branches are trusted as before.
        """
        network, table = _of(changed)
        exchange(self.network, network)
        self.network = network
        self.gap_edge_G.copy_(torch.from_numpy(table.gap_edges))
        fresh = CalibrationTable.of(torch.from_numpy(table.survival_K))
        for mine, value in zip(self.calibration, fresh, strict=True):
            mine.copy_(value)

    def draft_pass(self, key: DraftKey) -> EaglePass:
        return EaglePass(key, self)

    def follow(self, rows: RowTable, kept: KeptRows, forwarded: Forward) -> None:
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
    network, table = drafter.network, drafter.calibration
    assert isinstance(network, GpuEagleNetwork) and isinstance(table, OnlineTable)
    return network, table


class EaglePass:
    def __init__(self, key: DraftKey, drafts: EagleDrafts) -> None:
        self.key, self._drafts = key, drafts
        device = drafts.state.upload_U.device.type
        self.draft = Draft.allocate(key.batch, key.depth, key.width, device=device)
        self.nodes = Nodes.allocate(key.batch, columns(key.depth, key.width), device=device)
        self.own_columns = growth.columns(key.depth, key.width)
        self._match_BJW = drafts.branches.workspace(key)
        self._attend = [
            drafts.attention.planned(
                Draft.level(key.batch, key.width, level)[1], requests=key.batch
            )
            for level in range(key.depth)
        ]

    def run(self) -> None:
        key, draft, drafts = self.key, self.draft, self._drafts
        state, network = drafts.state, drafts.network
        roots(
            state.batch_slot_B(key.batch),
            state.batch_slots,
            draft,
            self.nodes,
            depth=key.depth,
            trash=state.kv_slots.trash,
            drafter=index_of(key.drafter),
        )
        hint_XH = torch.empty(
            len(draft.source_X), network.config.hidden_size, device=state.upload_U.device
        )
        for level in range(key.depth):
            first, count = Draft.level(key.batch, key.width, level)
            rows, source_M = draft.rows.part(first, count), draft.source_X[first : first + count]
            hint_MH = gather(
                hint_XH if level else state.batch_slots.hint_QH,
                source_M,
                out_RH=hint_XH[first : first + count],
            )
            attend = self._attend[level]
            attend.plan(rows, state.batch_slots.page_table_QP)
            logits_MC = network.forward(
                RowTensors(rows.token_R, rows.position_R, rows.kv_slot_R),
                hint_MH,
                drafts.cache,
                attend,
            )
            token_ML, z_ML = children(
                logits_MC, network.target_ids_C, rows, state.batch_slots, width=key.width
            )
            grow(
                level,
                token_ML,
                z_ML,
                draft,
                self.nodes,
                drafts.calibration,
                drafts.gap_edge_G,
                requests=key.batch,
                depth=key.depth,
                width=key.width,
                first_kv_slot=state.kv_slots.tree_start,
                trash=state.kv_slots.trash,
                idle=state.batch_slots.idle,
            )
        drafts.branches.graft(key, self.nodes, self._match_BJW)
