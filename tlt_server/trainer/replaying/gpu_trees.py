"""Trees of a replayed drafter on a GPU, by the serving kernels: the device half of `replay`.

A drafter's keys and values of all staged tokens are computed once, from their features; then any
number of roots is drafted from together, each in its own batch slot with the pages of its response.
In strict numerics the bits do not depend on the batch, so a chain of drafts is the one that was
served.

Legend: B roots, T staged tokens, N nodes, S KV slots, H hidden, G gap edges.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tlt_kernels.gpu import growth
from tlt_kernels.gpu.priority import compared
from tlt_kernels.gpu.tensors import PAGE_SIZE, BatchSlots, CalibrationTable
from tlt_kernels.gpu.upload import UNLIMITED
from tlt_server.attention.gpu import TritonPaged
from tlt_server.models.gpu.draft_tree import DraftTrees
from tlt_server.models.gpu.eagle import GpuEagleNetwork
from tlt_server.models.gpu.layers import RowTensors
from tlt_server.speculation.batch import Candidates, DraftBatch
from tlt_server.speculation.drafters.cpu import DraftWeights
from tlt_server.speculation.node_table import candidates_of
from tlt_server.trainer.replaying.replay import StagedResponses
from tlt_server.wire.records import Strategy

CHUNK = 2048  # tokens whose keys and values are computed at once
EVERY_DRAFTER = 2**31 - 1  # bits of `BatchSlots.drafters_Q`
SHAPES = 32  # kept buffers: nine sizes of some strategies, 2 MB each at most


class GpuTrees:
    """The `branches.Proposing` of a replay on a GPU."""

    def __init__(
        self, staged: StagedResponses, weights: DraftWeights, *, max_requests: int, max_rows: int
    ) -> None:
        """`max_rows`: draft rows of one proposal."""
        network: GpuEagleNetwork = weights.network
        config, placement = network.config, network.placement
        self.calibration, self._network, self._staged = weights.calibration, network, staged
        self._device = placement.device
        pages = staged.cache.pages
        self._trash = pages * PAGE_SIZE
        self._max_requests, self._max_rows = max_requests, max_rows
        self._cache = placement.cache(config, pages, 1 + max_rows, network.kv_layers)
        self._hint_SH = placement.empty(self._trash, config.hidden_size)
        self._attention = TritonPaged(
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            context=config.max_position,
            device=self._device,
            dtype=placement.dtype,
            numerics="strict",
        )
        self._slots = BatchSlots.allocate(
            max_requests + 1,
            pages * PAGE_SIZE,
            hidden=config.hidden_size,
            dtype=placement.dtype,
            device=self._device.type,
        )
        self._slots.drafters_Q.fill_(EVERY_DRAFTER)
        self._slots.max_depth_Q.fill_(UNLIMITED)
        self._gap_edge_G = torch.tensor(self.calibration.gap_edges, device=self._device)
        self._trees: dict[tuple[int, int, int], DraftTrees] = {}
        self._known = 0  # number of the staging whose keys and values are here

    def propose(self, batch: DraftBatch, strategy: Strategy) -> Candidates:
        """Draft a tree from each root. Without a budget, also expand nodes of very low acceptance
        probability.
        """
        with torch.inference_mode():
            self._catch_up()
            return self._drafted(batch, strategy)

    def observe(self, batch: DraftBatch, candidates: Candidates, accepted_N: object) -> None:
        self.calibration.observe(
            candidates.cell_N, candidates.parent_N, np.asarray(accepted_N, np.int8)
        )

    def _drafted(self, batch: DraftBatch, strategy: Strategy) -> Candidates:
        slots, requests = self._slots, len(batch)
        level_rows = strategy.width * (strategy.depth - 1)
        room = min(self._max_requests, self._max_rows // max(1, level_rows))
        assert requests <= room, f"{requests} requests of {strategy.name}, {room} have room"
        size = min(1 << (requests - 1).bit_length(), room)  # few sizes, so that buffers are kept
        position_B = np.array([len(tokens) - 1 for tokens in batch.tokens], np.int64)
        last_B = np.array([tokens[-1] for tokens in batch.tokens], np.int32)
        table_BP = batch.page_table_BP.astype(np.int64)
        before_B = position_B - 1  # a root's hint is the feature of the position before it
        at_B = table_BP[np.arange(requests), before_B // PAGE_SIZE] * PAGE_SIZE
        at_B += before_B % PAGE_SIZE

        def put(values: NDArray[np.generic]) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

        own = slice(0, requests)
        slots.token_QT[put(np.arange(requests)), put(position_B)] = put(last_B)
        slots.length_Q[own] = put((position_B + 1).astype(np.int32))
        slots.limit_Q[own] = put((position_B + 2 + batch.max_depth_B).astype(np.int32))
        slots.capacity_Q[own] = UNLIMITED
        slots.page_table_QP[own, : table_BP.shape[1]] = put(table_BP.astype(np.int32))
        slots.seed_Q[own] = put(batch.seed_B.view(np.int64))
        slots.temperature_Q[own] = put(batch.temperature_B)
        slots.hint_QH[own] = self._hint_SH[put(at_B)]
        slots.done_Q.fill_(1)
        slots.done_Q[own] = 0
        batch_slot_B = torch.full((size,), slots.idle, dtype=torch.int32, device=self._device)
        batch_slot_B[:requests] = torch.arange(requests, dtype=torch.int32, device=self._device)
        trees = self._of(size, strategy.depth, strategy.width)
        acceptance_K = torch.from_numpy(self.calibration.acceptance_K.copy()).to(self._device)
        trees.grow(
            self._network,
            self._cache,
            batch_slot_B,
            slots,
            CalibrationTable.of(acceptance_K),
            self._gap_edge_G,
            drafter=0,
            trash=self._trash,
            first_kv_slot=self._trash + 1,
            floor=growth.FLOOR if strategy.draft_rows(requests) else 0.0,
        )
        nodes = trees.nodes.head(requests)
        acceptance_BC = compared(nodes.acceptance_BC)  # so that ties are those of a step
        parts = nodes.parent_BC, nodes.depth_BC, acceptance_BC, nodes.token_BC, nodes.cell_BC
        columns = nodes.acceptance_BC.shape[1]
        return candidates_of(columns, columns, *(part.flatten().cpu().numpy() for part in parts))

    def _of(self, requests: int, depth: int, width: int) -> DraftTrees:
        """Return the buffers of a shape. The most recently used ones are kept."""
        key = requests, depth, width
        trees = self._trees.pop(key, None) or DraftTrees(
            self._attention, *key, columns=growth.columns(depth, width), device=self._device.type
        )
        self._trees[key] = trees
        if len(self._trees) > SHAPES:
            del self._trees[next(iter(self._trees))]
        return trees

    def _catch_up(self) -> None:
        """Compute fused features, keys and values of all staged tokens."""
        staged, network = self._staged, self._network
        if self._known == staged.number:
            return
        kv_slot_T, position_T = staged.kv_slot_T, staged.position_T
        for start in range(0, len(kv_slot_T), CHUNK):
            part = slice(start, min(start + CHUNK, len(kv_slot_T)))
            at_R = torch.from_numpy(kv_slot_T[part])
            features_RF = staged.cache.features_SF[at_R].to(self._device, network.placement.dtype)
            self._hint_SH[at_R.to(self._device)] = network.fuse(features_RF)
        own_T = np.flatnonzero(position_T > 0)  # nothing precedes the others
        for start in range(0, len(own_T), CHUNK):
            row_R = own_T[start : start + CHUNK]
            before_R = torch.from_numpy(kv_slot_T[row_R - 1]).to(self._device)
            rows = RowTensors(
                *(
                    torch.from_numpy(values_T[row_R].astype(np.int32)).to(self._device)
                    for values_T in (staged.token_T, position_T, kv_slot_T)
                )
            )
            network.store(rows, self._hint_SH[before_R], self._cache)
        self._known = staged.number
