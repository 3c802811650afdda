"""Draft trees of an EAGLE network on a GPU, level by level, for a captured draft pass and for the
replay of recorded responses.

Legend: as in `tlt_kernels.gpu.tensors`; X draft rows, M rows of a level, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_kernels.gpu import growth
from tlt_kernels.gpu.gather import gather
from tlt_kernels.gpu.growth import grow, roots
from tlt_kernels.gpu.tensors import BatchSlots, CalibrationTable, Draft, Nodes
from tlt_server.attention.gpu import GpuAttention
from tlt_server.attention.rows import KVCache
from tlt_server.models.gpu.eagle import GpuEagleNetwork
from tlt_server.models.gpu.layers import RowTensors


class DraftTrees:
    """The buffers of trees of one shape, and the launches that grow them."""

    def __init__(
        self,
        attention: GpuAttention,
        requests: int,
        depth: int,
        width: int,
        *,
        columns: int,
        device: str,
    ) -> None:
        """`columns`: of the node table, at least `growth.columns(depth, width)`."""
        self.requests, self.depth, self.width, self._device = requests, depth, width, device
        self.draft = Draft.allocate(requests, depth, width, device=device)
        self.nodes = Nodes.allocate(requests, columns, device=device)
        self.own_columns = growth.columns(depth, width)
        self._attend = [
            attention.planned(Draft.level(requests, width, level)[1], requests=requests)
            for level in range(depth)
        ]

    def grow(
        self,
        network: GpuEagleNetwork,
        cache: KVCache,
        batch_slot_B: Tensor,
        batch_slots: BatchSlots,
        calibration: CalibrationTable,
        gap_edge_G: Tensor,
        *,
        drafter: int,
        trash: int,
        first_kv_slot: int,
        floor: float = growth.FLOOR,
    ) -> None:
        """Fill `nodes`. Draft rows write their KV from `first_kv_slot` of the cache on. `drafter`:
        its bit in `BatchSlots.drafters_Q`.
        """
        draft, depth, width = self.draft, self.depth, self.width
        roots(
            batch_slot_B, batch_slots, draft, self.nodes, depth=depth, trash=trash, drafter=drafter
        )
        hint_XH = torch.empty(len(draft.source_X), network.config.hidden_size, device=self._device)
        for level in range(depth):
            first, count = Draft.level(self.requests, width, level)
            rows, source_M = draft.rows.part(first, count), draft.source_X[first : first + count]
            hint_MH = gather(
                hint_XH if level else batch_slots.hint_QH,
                source_M,
                out_RH=hint_XH[first : first + count],
            )
            attend = self._attend[level]
            attend.plan(rows, batch_slots.page_table_QP)
            logits_MC = network.forward(
                RowTensors(rows.token_R, rows.position_R, rows.kv_slot_R), hint_MH, cache, attend
            )
            token_ML, z_ML = network.children(
                logits_MC, rows, batch_slots, width=width, level=level
            )
            grow(
                level,
                token_ML,
                z_ML,
                draft,
                self.nodes,
                calibration,
                gap_edge_G,
                requests=self.requests,
                depth=depth,
                width=width,
                first_kv_slot=first_kv_slot,
                trash=trash,
                idle=batch_slots.idle,
                floor=floor,
            )
