"""A CPU's half of a worker rank: its shard of the target, and KV."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import torch

from tlt_kernels.cpu.compiled import compile_all
from tlt_kernels.cpu.elementwise import copy_kv_slots
from tlt_server.attention.rows import KVCache, Rows
from tlt_server.engine.cpu.orders import CheckNumerics, ExtendRows, Install, Keep
from tlt_server.engine.exchange.gloo import GlooExchange, sum_of_states
from tlt_server.engine.ranks.arena import layout
from tlt_server.engine.ranks.memory import Handlers, RankMemory
from tlt_server.engine.ranks.orders import Allocate, RankStart
from tlt_server.models.config import ModelConfig
from tlt_server.models.decoder import Decoder
from tlt_server.models.loader import empty_target
from tlt_server.models.numerics import Numerics
from tlt_server.models.split import Split


class CpuRank:
    def __init__(self, start: RankStart, side: socket.socket) -> None:
        """Join the other ranks. `side`: the socket that brings descriptors."""
        settings = self._settings = start.decided
        compile_all(("attention", "checksums", "elementwise"), lambda done, of: None)
        store = Path(start.directory) / "store"
        exchange = GlooExchange(store, start.rank, start.ranks)
        self._numerics = Numerics(settings.numerics, threads=start.threads)
        self._config = ModelConfig.served(settings)
        self._split = Split(settings.reduction_leaves, start.rank, start.ranks, exchange)
        self._memory = RankMemory(side, self._empty)
        self.handlers: Handlers = {
            **self._memory.handlers,
            CheckNumerics: self._check,
            Allocate: self._allocate,
        }

    def _empty(self, target: None) -> Decoder:
        settings = self._settings
        return empty_target(
            settings.model,
            numerics=self._numerics,
            config=self._config,
            attention=settings.attention,
            page_size=settings.page_size,
            split=self._split,
        )

    def _check(self, order: CheckNumerics) -> str:
        model = self._memory.models[order.key]
        model.self_test()
        return f"{self._numerics.method.name}; {layout(model)}"

    def _allocate(self, order: Allocate) -> None:
        models = self._memory.models
        model: Decoder = models[order.target]
        size, scratch = self._settings.page_size, self._settings.max_draft_rows
        rounds = self._settings.quantises_kv
        cache = model.make_cache(order.pages, size, scratch, rounds=rounds)
        self.handlers |= self._memory.handlers_of(cache, cache)
        self.handlers |= CpuSteps(models, model, cache).handlers


class CpuSteps:
    """The steps of a rank, once it has pages."""

    def __init__(self, models: dict[int, Any], model: Decoder, cache: KVCache) -> None:
        self._models, self._model, self._cache = models, model, cache
        self.handlers: Handlers = {
            ExtendRows: self._extend,
            Keep: self._keep,
            Install: self._install,
        }

    def _extend(self, order: ExtendRows) -> None:
        rows = Rows(
            *(
                torch.from_numpy(array)
                for array in (
                    order.token_R,
                    order.position_R,
                    order.kv_slot_R,
                    order.request_R,
                    order.base_B,
                    order.page_table_BP,
                    order.path_RD,
                )
            )
        )
        hidden_RH = self._model.forward(rows, self._cache).hidden_RH
        check = sum_of_states(hidden_RH, rows)
        self._model.logits(hidden_RH[torch.from_numpy(order.sampled_R)], check)
        for first, end in order.scored:
            self._model.logits(hidden_RH[first:end])

    def _keep(self, order: Keep) -> None:
        source, target = torch.from_numpy(order.source_A), torch.from_numpy(order.target_A)
        for array in (self._cache.k, self._cache.v):
            copy_kv_slots(array, source, target)

    def _install(self, order: Install) -> None:
        self._model = self._models[order.key]
