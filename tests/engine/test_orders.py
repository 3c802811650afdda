"""Orders between ranks, and the exchange that moves their sums."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from tlt_server.engine.cpu.orders import ExtendRows, Keep
from tlt_server.engine.exchange import gloo
from tlt_server.engine.exchange.gloo import GlooExchange
from tlt_server.engine.gpu.orders import DropKernels, ListKernels, LoadKernels
from tlt_server.engine.gpu.passes import Rehearsed
from tlt_server.engine.gpu.steps.drafts import DraftKey
from tlt_server.engine.gpu.steps.extend import ExtendKey
from tlt_server.engine.ranks import ranks
from tlt_server.engine.ranks.orders import Envelope, RankOrder, decoded, encoded
from tlt_server.engine.ranks.ranks import Ranks, _ended
from tlt_server.errors import EngineFailed
from tlt_server.models.split import folded

KEEP = Keep(np.array([3, 2**40], np.int64), np.array([1, 0], np.int64))


def test_arrays_arrive_unchanged_at_a_rank() -> None:
    table_BP = np.arange(12, dtype=np.int32).reshape(3, 4)[:, :2]
    none_RD = np.zeros((2, 0), np.int32)
    ids_R = np.array([5, 7], np.int64)
    sent = ExtendRows(
        ids_R, ids_R, ids_R, none_RD[:, 0:0].sum(1, dtype=np.int32), table_BP[:, 0], table_BP,
        none_RD, ids_R, [(0, 2)],
    )  # fmt: skip
    [found] = [decoded(encoded(Envelope("a", 1, False, sent)), "a", 1).order]
    assert isinstance(found, ExtendRows) and found.scored == [(0, 2)]
    for name in ("token_R", "page_table_BP", "path_RD", "request_R"):
        mine, theirs = getattr(found, name), getattr(sent, name)
        assert np.array_equal(mine, theirs) and mine.dtype == theirs.dtype, name
        assert mine.shape == theirs.shape and mine.flags.writeable, name


@pytest.mark.parametrize(
    "sent",
    [
        LoadKernels(3, False),
        DropKernels(),
        ListKernels(Rehearsed(None, (ExtendKey(4, 16, 48, 16, filtered=True),)), True),
        ListKernels(
            Rehearsed(DraftKey("eagle", 4, 3, 2), (ExtendKey(4, 16), ExtendKey(4, 32))), True
        ),
    ],
)
def test_kernel_orders_arrive_unchanged_at_a_rank(sent: RankOrder) -> None:
    assert decoded(encoded(Envelope("a", 1, False, sent)), "a", 1).order == sent


@pytest.mark.parametrize(
    ("epoch", "number", "why"),
    [
        ("b", 5, "an order of epoch 'b' came in epoch 'a'"),
        ("a", 6, "order 6 came instead of order 5: one was lost"),
        ("a", 4, "order 4 came instead of order 5: one came again"),
    ],
)
def test_order_out_of_turn_or_of_a_wrong_epoch_is_refused(
    epoch: str, number: int, why: str
) -> None:
    data = encoded(Envelope(epoch, number, False, KEEP))
    with pytest.raises(EngineFailed, match=why):
        decoded(data, "a", 5)


def test_array_of_an_unknown_dtype_is_refused() -> None:
    odd = Keep(np.array(["x"]), KEEP.target_A)
    with pytest.raises(ValueError, match="an order has an array of '<U1'"):
        decoded(encoded(Envelope("a", 1, False, odd)), "a", 1)


class OneRank(Ranks[Any]):
    """Rank 0 with a socket to a rank that is to be read by hand."""

    def __init__(self, path: Path) -> None:
        self._epoch, self.sent, self._processes, self._lock = "a", 0, [], threading.RLock()
        self._models, self._saved = deque(), deque()
        self._context, self._sockets = zmq.Context(), []
        for limit in (zmq.SNDHWM, zmq.RCVHWM):
            self._context.setsockopt(limit, 2)
        self._orders = [self._bound(zmq.PUSH, path / "orders")]
        self.taken = self._context.socket(zmq.PULL)
        self.taken.connect(f"ipc://{path}/orders")

    def close(self) -> None:
        self._context.destroy(linger=0)


def test_full_socket_blocks_then_fails_without_dropping_orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(ranks, "SEND_S", 0.3)
    large = Keep(np.zeros(2**17, np.int64), KEEP.target_A)
    rank = OneRank(tmp_path)
    request.addfinalizer(rank.close)
    reading = threading.Timer(0.1, rank.taken.recv)
    with pytest.raises(EngineFailed, match=r"rank 1 did not take order \d+ \(Keep\) in 0.3 s"):
        for number in range(1, 100):
            if number == 2:
                reading.start()  # room that comes in time is used
            rank.order(large)
    reading.join()
    assert 3 < rank.sent < 100
    for number in range(2, rank.sent):
        assert decoded(rank.taken.recv(), "a", number).order.source_A.size == 2**17
    assert not rank.taken.poll(50)


@pytest.fixture(scope="module")
def exchanges(tmp_path_factory: pytest.TempPathFactory) -> list[GlooExchange]:
    """Four ranks, each to be called in a thread of its own."""
    store = tmp_path_factory.mktemp("exchange") / "store"
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda rank: GlooExchange(store, rank, 4), range(4)))


def test_every_rank_sums_all_parts_as_one_tree(exchanges: list[GlooExchange]) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(3, 50, generator=generator) * 10.0**rank for rank in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda e, part: e.add(part), exchanges, parts))
    assert all(torch.equal(each, folded(parts)) for each in found)
    assert not torch.equal(found[0], folded(parts[::2] + parts[1::2])), "the order is not seen"


def test_ranks_join_columns_of_any_width_bit_for_bit(exchanges: list[GlooExchange]) -> None:
    widths = [3, 0, 2, 4]
    parts = [torch.full((2, width), float("nan")) for width in widths]
    parts[3][0] = torch.tensor([-0.0, 1e-45, float("inf"), 3.0])
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda e, part: e.join(part, widths, 2**64 - 1), exchanges, parts))
    expected = torch.cat(parts, dim=1).view(torch.int32)
    assert all(torch.equal(each.view(torch.int32), expected) for each in found)


def test_every_rank_names_the_differing_rank(exchanges: list[GlooExchange]) -> None:
    def join(exchange: GlooExchange) -> str:
        try:
            exchange.join(torch.zeros(0, 1), [1] * 4, 5 + (exchange.rank == 2))
        except EngineFailed as error:
            return error.message
        return ""

    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(join, exchanges))
    assert len(found) == 1 and "the states of rank 2 are not those of rank 0" in found.pop()


def test_silent_rank_fails_the_exchange_within_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gloo, "FIRST_S", 0.3)
    with ThreadPoolExecutor(2) as pool:
        two = list(pool.map(lambda rank: GlooExchange(tmp_path / "store", rank, 2), range(2)))
    with pytest.raises(EngineFailed, match="rank 1 left, or sent nothing for 0.3 s"):
        two[0].add(torch.zeros(1))


def test_unconnected_rank_is_reported_as_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gloo, "JOIN_S", 0.3)
    with pytest.raises(EngineFailed, match="rank 0 could not connect to rank 1 or 2 in 0.3 s"):
        GlooExchange(tmp_path / "store", 0, 3)

    def ended() -> None:
        raise EngineFailed("rank 2 ended")

    with pytest.raises(EngineFailed, match="rank 2 ended"):
        GlooExchange(tmp_path / "another store", 0, 3, left=ended)


def test_garbage_collected_ranks_end_without_waiting(tmp_path: Path) -> None:
    class Made:
        def __init__(self) -> None:
            self._context, self._sockets, self.itself = zmq.Context(), list[Any](), self

    made = Made()
    Ranks._bound(made, zmq.PUSH, tmp_path / "orders")  # type: ignore[arg-type]
    end = weakref.finalize(made, _ended, [], made._sockets, made._context, [])
    del made
    collecting = threading.Thread(target=gc.collect, daemon=True)
    collecting.start()
    collecting.join(10)
    assert not collecting.is_alive() and not end.alive
