"""A rank other than 0: computes its shard as it is ordered. It has no scheduler and no policy.
`Rank` is that of a CPU.

`rank.py` starts it, with a `RankStart` on its standard input, and ends it with rank 0. An order
that fails is answered where rank 0 asks for an answer, else it ends this process, as does an
exchange that fails; nothing waits beyond the bound of an exchange.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

import msgspec
import torch
import zmq
from msgspec import structs

from tlt_kernels.cpu.compiled import compile_all
from tlt_kernels.cpu.elementwise import copy_kv_slots
from tlt_server.attention.rows import KVCache, Rows
from tlt_server.engine.exchange.gloo import GlooExchange
from tlt_server.engine.ranks import orders
from tlt_server.engine.ranks.agreement import sum_of_states
from tlt_server.engine.ranks.arena import layout
from tlt_server.engine.ranks.memory import RankMemory
from tlt_server.engine.ranks.orders import (
    Allocate,
    CheckNumerics,
    ExtendRows,
    Install,
    Keep,
    Order,
    RankAnswer,
    RankStart,
)
from tlt_server.errors import EngineFailed, TltError, Unavailable
from tlt_server.models.config import ModelConfig
from tlt_server.models.decoder import Decoder
from tlt_server.models.loader import empty_target
from tlt_server.models.numerics import Numerics
from tlt_server.models.split import Split
from tlt_server.process.faults import trace
from tlt_server.registry import Registry

Socket = zmq.Socket[bytes]


class OrderedRank(Protocol):
    orders: Any  # the type of those that it follows

    def follow(self, order: Any) -> str:
        """Do as ordered, and return the text of an answer."""


FOLLOWING = Registry(
    "kind of rank",
    {
        "cpu": "tlt_server.engine.ranks.follower:Rank",
        "cuda": "tlt_server.engine.gpu.rank:GpuRank",
        "interpreter": "tlt_server.engine.gpu.rank:GpuRank",
    },
)
# The field of an answer that tells of an error; the first kind that fits counts.
ANSWERS: dict[type[Exception], str] = {
    torch.OutOfMemoryError: "exhausted",
    Unavailable: "refused",
    TltError: "error",
}


class Rank:
    """The state of a rank: its memory, the model in use, KV."""

    orders = Order

    def __init__(self, start: RankStart, side: socket.socket) -> None:
        """Join the others. `side`: where descriptors come."""
        settings = self._settings = start.decided
        compile_all(("attention", "checksums", "elementwise"), lambda done, of: None)
        store = Path(start.directory) / "store"
        exchange = GlooExchange(store, start.rank, start.ranks)
        self._numerics = Numerics(settings.numerics, threads=start.threads)
        config = ModelConfig.read(Path(settings.model))
        self._config = replace(config, max_position=start.max_position)
        self._split = Split(settings.reduction_leaves, start.rank, start.ranks, exchange)
        self._memory = RankMemory(side, self._empty)
        self._model: Decoder | None = None
        self._cache: KVCache | None = None

    @property
    def model(self) -> Decoder:
        assert self._model is not None, "an order before the first model"
        return self._model

    @property
    def cache(self) -> KVCache:
        assert self._cache is not None, "an order before the pages"
        return self._cache

    @torch.inference_mode()
    def follow(self, order: Order) -> str:
        """Do as ordered, and return the text of an answer."""
        match order:
            case ExtendRows():
                self._extend(order)
            case Keep(source_A, target_A):
                source, target = torch.from_numpy(source_A), torch.from_numpy(target_A)
                for array in (self.cache.k, self.cache.v):
                    copy_kv_slots(array, source, target)
            case CheckNumerics(key):
                model = self._memory.models[key]
                model.self_test()
                return f"{self._numerics.method.name}; {layout(model)}"
            case Install(key):
                self._model = self._memory.models[key]
            case Allocate(pages):
                size, scratch = self._settings.page_size, self._settings.max_draft_rows
                self._cache = self.model.make_cache(pages, size, scratch)
                self._memory.pages = self._memory.slept = self._cache
            case _:
                self._memory.follow(order)
        return ""

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
        hidden_RH = self.model.forward(rows, self.cache).hidden_RH
        check = sum_of_states(hidden_RH, rows)
        self.model.logits(hidden_RH[torch.from_numpy(order.sampled_R)], check)
        for first, end in order.scored:
            self.model.logits(hidden_RH[first:end])

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


def serve(start: RankStart, side: socket.socket, inbox: Socket, outbox: Socket) -> NoReturn:
    """Follow orders. `EngineFailed` where one cannot be followed that awaits no answer."""
    number, here = 0, msgspec.msgpack.encode(RankAnswer(start.rank, 0))
    outbox.send(here)
    rank: OrderedRank = FOLLOWING.resolve(start.device)(start, side)
    outbox.send(here)
    while True:
        number += 1
        envelope = orders.decoded(inbox.recv(), start.epoch, number, rank.orders)
        answer = RankAnswer(start.rank, number)
        try:
            answer = structs.replace(answer, text=rank.follow(envelope.order))
        except (torch.OutOfMemoryError, TltError) as cause:
            why = cause.message if isinstance(cause, TltError) else str(cause)[:200]
            if not envelope.asks:
                order = type(envelope.order).__name__
                raise EngineFailed(f"order {number} ({order}): {why}") from None
            field = next(name for kind, name in ANSWERS.items() if isinstance(cause, kind))
            answer = structs.replace(answer, **{field: why})
        if envelope.asks:
            outbox.send(msgspec.msgpack.encode(answer))


def follow(descriptor: int) -> NoReturn:
    """Be the rank that the standard input describes. `descriptor`: of the socket by which memory
    comes.
    """
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankStart)
    torch.set_num_threads(start.threads)
    side, context = socket.socket(fileno=descriptor), zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.connect(f"ipc://{start.directory}/{start.rank}")
    outbox.connect(f"ipc://{start.directory}/0")
    try:
        serve(start, side, inbox, outbox)
    except TltError as error:
        print(f"tlt: rank {start.rank}: {error.message}", file=sys.stderr)
        status = 2
    except Exception as error:
        print(trace(error, ready=True), file=sys.stderr)
        status = 1
    sys.stderr.flush()
    os._exit(status)  # without gloo's destructor, which may wait for a peer
