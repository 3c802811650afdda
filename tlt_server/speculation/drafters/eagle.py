"""EAGLE drafting: a best-first tree grown with the noise that the target will sample with.

Slot p of the drafter's KV holds (embed x_p, feature of p - 1), under the target's page ids, so
shared prefix pages are drafted once. When a request is next speculated on, missing slots are caught
up from the features kept with the target's KV: speculation turns on without a flush or a
re-prefill. Tree rows live in the drafter's scratch for one proposal. Any answer is lossless (see
`speculation/accept.py`).

Legend: R rows, B requests, P pages per request, D longest path, H hidden, F features, C nodes per
request, S slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_kernels.cpu.catch_up import lay_roots, undrafted
from tlt_kernels.cpu.growth import FIELDS, grow, harvest
from tlt_server.attention.rows import KVCache, Rows
from tlt_server.models.config import LayerShape, ModelConfig
from tlt_server.models.draft_checkpoint import (
    Fillable,
    check_drafter,
    describe,
    feature_layers,
    fill_drafter,
)
from tlt_server.models.draft_networks import Architecture
from tlt_server.models.gpu.limits import check_shape
from tlt_server.registry import load_object
from tlt_server.settings.server import QuantizationName
from tlt_server.speculation.batch import Candidates, DraftBatch
from tlt_server.speculation.calibration import Calibration
from tlt_server.speculation.drafters.cpu import DraftSetup, DraftWeights
from tlt_server.wire.records import Strategy

CHUNK = 512  # catch-up rows per forward
JOIN = 32  # up to this many catch-up rows ride in the roots' own forward
FLOOR = 0.02  # a node that survives less is not expanded: its row costs more than it brings


class DraftNetwork(Protocol):
    """A network's operations for the drafter; see `models/eagle.py`."""

    target_ids: Tensor  # int64 [draft vocabulary]

    def make_cache(self, pages: int, page_size: int, scratch: int) -> KVCache: ...
    def fuse(self, features_RF: Tensor) -> Tensor: ...
    def forward(self, rows: Rows, g_RH: Tensor, cache: KVCache) -> Tensor: ...
    def store_only(self, rows: Rows, g_RH: Tensor, cache: KVCache) -> None: ...
    def logits(self, h_RH: Tensor) -> Tensor: ...


class RowBuffer:
    """Reused tensors for the rows of one forward, and the numpy views that kernels fill."""

    def __init__(self, capacity: int) -> None:
        self.token_R, self.position_R, self.kv_slot_R, self.source_R = (
            torch.zeros(capacity, dtype=torch.int64) for _ in range(4)
        )
        self.request_R = torch.zeros(capacity, dtype=torch.int32)
        self.path = torch.zeros(capacity, dtype=torch.int32)  # flat [R * D]
        self.token, self.position, self.kv_slot, self.source, self.request, self.path_flat = (
            t.numpy()
            for t in (
                self.token_R,
                self.position_R,
                self.kv_slot_R,
                self.source_R,
                self.request_R,
                self.path,
            )
        )
        self.node = np.full(capacity, -1, np.int32)

    def reserve_path(self, size: int) -> None:
        if len(self.path) < size:
            self.path = torch.zeros(size, dtype=torch.int32)
            self.path_flat = self.path.numpy()

    def rows(self, count: int, base_B: Tensor, page_table_BP: Tensor, path_length: int) -> Rows:
        return Rows(
            self.token_R[:count],
            self.position_R[:count],
            self.kv_slot_R[:count],
            self.request_R[:count],
            base_B,
            page_table_BP,
            self.path[: count * path_length].view(count, path_length),
        )


class EagleLoader:
    """The `drafters.Loader` of the published checkpoint layouts."""

    def feature_layers(self, directory: Path, target: ModelConfig) -> tuple[int, ...]:
        return feature_layers(directory, target)

    def empty(
        self, directory: Path, target: Any, *, quantization: QuantizationName = "none"
    ) -> Any:
        described = describe(directory, target)
        config = described.config.stored_as(quantization, str(directory))
        described = described._replace(config=config)
        return load_object(self.network(described.architecture))(described, target)

    def network(self, architecture: Architecture) -> str:
        """Return "module:Class" of the network on this device."""
        return architecture.cpu

    def fill(self, network: Fillable, directory: Path) -> None:
        fill_drafter(network, directory)

    def check(self, network: Fillable, directory: Path) -> None:
        check_drafter(network, directory)

    def calibration(self, directory: Path) -> Calibration:
        return Calibration.load(directory)

    def parse_calibration(self, content: bytes, source: str) -> Calibration:
        return Calibration.parse(content, source)


class GpuEagleLoader(EagleLoader):
    """The loader of the same checkpoint layouts on a GPU."""

    def network(self, architecture: Architecture) -> str:
        return architecture.gpu

    def check(self, network: Fillable, directory: Path) -> None:
        config = network.config
        check_shape(config, LayerShape(mlp_bias=config.mlp_bias), str(directory))
        super().check(network, directory)


class Eagle:
    """The EAGLE drafter on a CPU. `max_rows` bounds the scratch: the tree rows of one proposal over
    all requests and depths. Larger strategies are cut to it.
    """

    def __init__(self, setup: DraftSetup, floor: float = FLOOR) -> None:
        assert setup.weights is not None, "it drafts with a network"
        target_cache, max_requests, max_rows = (
            setup.target_cache,
            setup.max_requests,
            setup.max_rows,
        )
        self.name, self.floor = setup.name, floor
        self.network: DraftNetwork = setup.weights.network
        self.calibration: Calibration = setup.weights.calibration
        self.features_SF, self.page_size = target_cache.features_SF, target_cache.page_size
        self.max_requests, self.max_rows = max_requests, max_rows
        self.cache = self.network.make_cache(target_cache.pages, self.page_size, max_rows)
        self.first_kv_slot = self.cache.scratch_start
        self.target_ids = self._vocabulary()
        self.drafted_S = np.zeros(target_cache.pages * target_cache.page_size, np.bool_)
        self.full_P = np.zeros(target_cache.pages, np.bool_)
        self.buffer = RowBuffer(max(CHUNK, JOIN + max_requests, max_rows))
        # Hidden states of every row of the proposal that drew logits.
        self.hidden_RH: Tensor | None = None
        self.node_BCI = np.zeros((0, 0, FIELDS), np.int32)
        self.acceptance_BC = np.zeros((0, 0), np.float32)
        target_cache.on_reuse.append(self.pages_freed)
        self._caught_up = self._forwards = self._proposed = 0

    @classmethod
    def make(cls, setup: DraftSetup) -> Eagle:
        return cls(setup)

    @property
    def caches(self) -> Sequence[KVCache]:
        return (self.cache,)

    @property
    def tables(self) -> Mapping[str, Calibration]:
        return {self.name: self.calibration}

    def install(self, weights: DraftWeights | None) -> None:
        """Drop all drafter KV, which is stale after a change of target or drafter; it is caught up
        lazily.
        """
        assert weights is not None, "a push replaces the drafter's weights, it never removes them"
        self.network = weights.network
        self.calibration.adopt(weights.calibration)
        self.target_ids = self._vocabulary()
        self.pages_freed(range(len(self.full_P)))

    @torch.inference_mode()
    def propose(self, batch: DraftBatch, strategy: Strategy) -> Candidates:
        requests, width = len(batch), strategy.width
        assert requests <= self.max_requests, f"{requests} requests, built for {self.max_requests}"
        root_B, limit_B = self._limits(batch, strategy)
        depth = int(limit_B.max(initial=0))
        if depth <= 0 or width <= 0:
            return Candidates.empty()
        pick_width = min(width, self.max_rows // (requests * (depth - 1))) if depth > 1 else 0
        budget = strategy.draft_rows(requests)
        floor = self.floor if budget else 0.0  # verifying nothing: the whole tree is of interest
        buffer, path_length = self.buffer, depth - 1
        buffer.reserve_path(requests * pick_width * path_length)
        node_BCI, acceptance_BC = self._nodes(requests, width + (depth - 1) * pick_width * width)
        count_B = np.zeros(requests, np.int32)
        base_B = torch.from_numpy((root_B + 1).astype(np.int32))
        # Another memory layout would compile the kernels again.
        table_BP = np.ascontiguousarray(batch.page_table_BP)
        page_table_BP = torch.from_numpy(table_BP)
        h_RH = self._run_roots(batch, root_B, limit_B, base_B, table_BP, page_table_BP)
        seen = drafted = 0
        for level in range(depth):
            hidden_RH = self._keep(h_RH, seen)
            rows = grow(
                self.network.logits(h_RH).numpy(),
                self.target_ids,
                seen,
                width,
                pick_width if level < depth - 1 else 0,
                budget,
                floor,
                self.first_kv_slot + drafted,
                root_B,
                limit_B,
                batch.seed_B,
                batch.temperature_B,
                self.calibration.acceptance_K,
                self.calibration.gap_edges,
                node_BCI,
                acceptance_BC,
                count_B,
                buffer.token,
                buffer.position,
                buffer.kv_slot,
                buffer.request,
                buffer.node,
                buffer.source,
                buffer.path_flat,
                path_length,
            )
            if not rows:
                break
            seen, drafted = seen + len(h_RH), drafted + rows
            g_RH = hidden_RH.index_select(0, buffer.source_R[:rows])
            h_RH = self.network.forward(
                buffer.rows(rows, base_B, page_table_BP, path_length), g_RH, self.cache
            )
            self._forwards += 1
        candidates = Candidates(*harvest(node_BCI, acceptance_BC, count_B))
        self._proposed += len(candidates)
        return candidates

    def _keep(self, h_RH: Tensor, seen: int) -> Tensor:
        """Store a level's hidden states after the `seen` rows before; return the buffer of all."""
        if self.hidden_RH is None:
            rows = self.max_requests + self.max_rows
            self.hidden_RH = torch.empty(rows, h_RH.shape[1], dtype=h_RH.dtype)
        self.hidden_RH[seen : seen + len(h_RH)] = h_RH
        return self.hidden_RH

    def _limits(
        self, batch: DraftBatch, strategy: Strategy
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the position of each root, and the number of levels below it."""
        requests = len(batch)
        root_B = np.fromiter(map(len, batch.tokens), np.int64, requests) - 1
        limit_B = np.minimum(
            batch.max_depth_B, min(strategy.depth, 1 + self.max_rows // max(requests, 1))
        ).astype(np.int32)
        limit_B[root_B < 1] = 0  # no feature precedes the first token
        root_B[limit_B <= 0] = 0
        return root_B, limit_B

    def observe(self, batch: DraftBatch, candidates: Candidates, accepted_N: object) -> None:
        self.calibration.observe(
            candidates.cell_N, candidates.parent_N, np.asarray(accepted_N, np.int8)
        )

    def finish(
        self, request_id: str, group_id: str, tokens: object, prompt_len: int, salt: str = ""
    ) -> None:
        """Do nothing: `pages_freed` handles a request's pages."""

    def forget(self) -> None:
        """Do nothing: this drafter keeps no text."""

    def pages_freed(self, page_ids: Iterable[int]) -> None:
        """Drop the KV of these pages. The engine calls this before it reuses a page for other
        tokens.
        """
        pages = np.fromiter(page_ids, np.int64)
        self.drafted_S.reshape(-1, self.page_size)[pages] = False
        self.full_P[pages] = False

    def gauges(self) -> Mapping[str, float]:
        return {
            f"{self.name}_caught_up_rows": float(self._caught_up),
            f"{self.name}_forwards": float(self._forwards),
            f"{self.name}_proposed_nodes": float(self._proposed),
            **self.calibration.gauges(),
        }

    def _vocabulary(self) -> np.ndarray:
        return np.ascontiguousarray(self.network.target_ids.cpu().numpy(), dtype=np.int64)

    def _run_roots(
        self,
        batch: DraftBatch,
        root_B: np.ndarray,
        limit_B: np.ndarray,
        base_B: Tensor,
        table_BP: np.ndarray,
        page_table_BP: Tensor,
    ) -> Tensor:
        """Catch up, then run the root rows. Return their hidden states; the buffer begins with
        their requests.
        """
        buffer, cursor = self.buffer, np.array([0, 1])
        kv_slot, source, position, request = (
            view[:CHUNK]
            for view in (buffer.kv_slot, buffer.source, buffer.position, buffer.request)
        )
        while True:
            behind = undrafted(
                table_BP,
                root_B,
                self.page_size,
                self.drafted_S,
                self.full_P,
                cursor,
                kv_slot,
                source,
                position,
                request,
            )
            self._caught_up += behind
            if behind <= JOIN and cursor[0] == len(root_B):
                break
            g_RH = self._lay_tokens(batch, behind)
            self.network.store_only(buffer.rows(behind, base_B, page_table_BP, 0), g_RH, self.cache)
        roots = lay_roots(
            table_BP,
            root_B,
            limit_B,
            self.page_size,
            self.drafted_S,
            behind,
            buffer.kv_slot,
            buffer.source,
            buffer.position,
            buffer.request,
            buffer.node,
        )
        g_RH = self._lay_tokens(batch, behind + roots)
        h_RH = self.network.forward(
            buffer.rows(behind + roots, base_B, page_table_BP, 0), g_RH, self.cache
        )
        self._forwards += 1
        buffer.request[:roots] = buffer.request[behind : behind + roots]
        buffer.node[:roots] = -1
        return h_RH[behind:]

    def _lay_tokens(self, batch: DraftBatch, rows: int) -> Tensor:
        """Fill the tokens of the catch-up and root rows; return the fused features of the positions
        before them.
        """
        buffer = self.buffer
        for r, (request, position) in enumerate(
            zip(buffer.request[:rows].tolist(), buffer.position[:rows].tolist(), strict=True)
        ):
            buffer.token[r] = batch.tokens[request][position]
        return self.network.fuse(self.features_SF.index_select(0, buffer.source_R[:rows]))

    def _nodes(self, requests: int, per_request: int) -> tuple[np.ndarray, np.ndarray]:
        if self.node_BCI.shape[0] < requests or self.node_BCI.shape[1] < per_request:
            shape = (
                max(requests, self.node_BCI.shape[0]),
                max(per_request, self.node_BCI.shape[1]),
            )
            self.node_BCI, self.acceptance_BC = (
                np.zeros((*shape, FIELDS), np.int32),
                np.zeros(shape, np.float32),
            )
        return self.node_BCI, self.acceptance_BC
