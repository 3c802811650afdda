"""Waits of rank 0 for the other GPUs, and the memory that it takes there, without a GPU."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
import torch

from tests.engine.lockstep import group as windows_of
from tests.engine.tiny import SMALLEST, write_target
from tlt_client.channels.errors import ChannelLost
from tlt_client.channels.memory import SharedGpuMemory
from tlt_kernels.gpu.agreement import SUM_FLOATS
from tlt_server.engine.exchange.meeting import Meeting
from tlt_server.engine.gpu import link
from tlt_server.engine.gpu.device import CudaDevice
from tlt_server.engine.gpu.flight import Flight, newest_tokens
from tlt_server.engine.gpu.link import GpuLink
from tlt_server.engine.gpu.memory.graphs import GraphPool
from tlt_server.engine.gpu.orders import Begin, ListKernels, LoadKernels, ReportMemory, Settle
from tlt_server.engine.gpu.passes import Rehearsed
from tlt_server.engine.gpu.steps.agreement import WORDS, Agreement
from tlt_server.engine.gpu.steps.ring import PinnedBuffer
from tlt_server.engine.ranks import follower
from tlt_server.engine.ranks.answers import RankAnswers
from tlt_server.engine.ranks.arena import Arena
from tlt_server.engine.ranks.orders import (
    Drop,
    Envelope,
    RankAnswer,
    RankOrder,
    RankOrders,
    RankStart,
    encoded,
)
from tlt_server.engine.ranks.ranks import Ranks
from tlt_server.engine.ranks.shared_models import SharedSplit
from tlt_server.errors import EngineFailed, Unavailable
from tlt_server.models.config import ModelConfig
from tlt_server.models.gpu.decoder import GpuDecoder, device_table
from tlt_server.models.gpu.matmuls import MATMULS
from tlt_server.models.gpu.placement import Placement
from tlt_server.models.split import Split
from tlt_server.weights.storage import ran_out

WAIT_S = 0.5


class Stepping(GpuLink):
    """Rank 0, while a step is in flight in which rank 1 has died, differs or has waited."""

    words = 2 * WORDS

    def __init__(self, died: str, words: Sequence[int] = (1, 3, 0, 0)) -> None:
        def check_ended() -> None:
            if died:
                raise EngineFailed(died)

        self.died, self._begun = died, True
        self._ranks = SimpleNamespace(sent=7, check_ended=check_ended)  # type: ignore[assignment]
        self.agreement = agreement = Agreement(windows_of(2, SUM_FLOATS)[0])
        agreement.begin()
        agreement.found_TW.copy_(torch.tensor([[1, 2, 0, 0], words]))


class NeverPassed:
    """Stands for the event of a copy for which the GPU never has time."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pytest.fail("a wait without an end")


def test_waiting_for_a_step_lets_other_threads_work() -> None:
    """The thread that stages a push needs the interpreter's lock often, for a short time each."""
    waiting = Stepping("")
    end_s, turns = time.monotonic() + WAIT_S, 0

    class Outcome:
        @property
        def arrived(self) -> bool:
            return time.monotonic() > end_s

    def work() -> None:
        nonlocal turns
        while time.monotonic() < end_s:
            time.sleep(0)
            turns += 1

    thread = threading.Thread(target=work)
    thread.start()
    waiting.wait(Outcome())  # type: ignore[arg-type]
    thread.join()
    assert turns > 5 * WAIT_S / 0.005, "one turn per interval of the interpreter's lock"


class Inbox:
    """The answers of rank 1 that have come."""

    def __init__(self) -> None:
        self.answers: list[RankAnswer] = []

    def poll(self, timeout_ms: int) -> bool:
        return bool(self.answers)

    def recv(self) -> bytes:
        return msgspec.msgpack.encode(self.answers.pop(0))


class Answering(Ranks[Any]):
    """Rank 0 with the answers of rank 1 in an inbox."""

    def __init__(self, inbox: Inbox) -> None:
        self._answers = RankAnswers(inbox, 1, lambda: None)  # type: ignore[arg-type]
        self._lock, self._epoch, self.sent = threading.RLock(), "a", 0
        self._orders, self._models, self._saved = [], deque(), deque()
        self._freed, self._begun = [], deque()


def test_started_orders_finish_once_every_rank_has_answered() -> None:
    inbox = Inbox()
    ranks = Answering(inbox)
    assert ranks.done()
    ranks.begin(ListKernels(Rehearsed(None, ()), True))
    ranks.begin(LoadKernels(3, False))
    assert not ranks.done()
    inbox.answers.append(RankAnswer(1, 1))
    assert not ranks.done()
    inbox.answers.append(RankAnswer(1, 2))
    assert ranks.done()


def test_refused_orders_are_forgotten_once_finished() -> None:
    """A later preparation is not told of an earlier one's refusal."""
    inbox = Inbox()
    ranks = Answering(inbox)
    for _ in range(3):
        ranks.begin(LoadKernels(3, False))
    inbox.answers += [RankAnswer(1, number, refused="no room") for number in (1, 2, 3)]
    with pytest.raises(Unavailable, match="rank 1: no room"):
        ranks.done()
    with pytest.raises(Unavailable, match="rank 1: no room"):
        ranks.finish()
    assert ranks.done()


class Lacking:
    """A rank that cannot load a kernel, its inbox and its outbox."""

    error = Unavailable("kernel grow of this policy is not loaded")

    def __init__(self, *asks: bool) -> None:
        order = LoadKernels(1, True)
        self.sent = [encoded(Envelope("a", n, each, order)) for n, each in enumerate(asks, 1)]
        self.answers: list[RankAnswer] = []
        self.handlers = {LoadKernels: self.refuse}

    def refuse(self, order: object) -> str:
        raise self.error

    def recv(self) -> bytes:
        if not self.sent:
            raise EOFError
        return self.sent.pop(0)

    def send(self, data: bytes) -> None:
        self.answers.append(msgspec.msgpack.decode(data, type=RankAnswer))


def served(rank: Lacking, monkeypatch: pytest.MonkeyPatch) -> list[RankAnswer]:
    """Let a rank follow the sent orders, and return its answers after those of its start."""
    following = SimpleNamespace(resolve=lambda name: lambda *a: rank)
    monkeypatch.setattr(follower, "FOLLOWING", following)
    start = RankStart("a", 1, 2, "cuda", "", "", 1)
    with pytest.raises(EOFError):
        follower.serve(start, None, rank, rank)  # type: ignore[arg-type]
    return rank.answers[2:]


def test_rank_reports_a_refused_order_and_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = [RankAnswer(1, number, refused=Lacking.error.message) for number in (1, 2)]
    assert served(Lacking(True, True), monkeypatch) == refused
    with pytest.raises(EngineFailed, match=r"order 1 \(LoadKernels\): kernel grow"):
        served(Lacking(False), monkeypatch)


def test_order_sent_before_its_prerequisite_ends_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    early = Lacking(False)
    early.handlers.clear()
    with pytest.raises(EngineFailed, match=r"\(LoadKernels\): LoadKernels came before the objects"):
        served(early, monkeypatch)


def newest_of(group: Stepping, event: Any) -> dict[Any, list[int]]:
    """Wait for a step in flight as the next step of a structured output does."""
    buffer = PinnedBuffer(torch.zeros(8, dtype=torch.int32), event, group.wait)
    outcome = group.copy_sums(buffer)
    flight = Flight(*[None] * 5, outcome, *[None] * 3)  # type: ignore[arg-type]
    return newest_tokens([flight], 0)


def test_structured_outputs_end_their_wait_when_a_rank_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began_s = time.monotonic()
    with pytest.raises(EngineFailed, match="rank 1 ended"):
        newest_of(Stepping("rank 1 ended"), NeverPassed())
    assert time.monotonic() - began_s < link.STEP_S
    monkeypatch.setattr(link, "STEP_S", 0.3)
    with pytest.raises(EngineFailed, match=r"waited 0.3 s for order 7 on the GPUs"):
        newest_of(Stepping(""), NeverPassed())


def test_structured_outputs_refuse_tokens_of_differing_ranks() -> None:
    with pytest.raises(EngineFailed, match="ranks differ after order 7: the states of rank 1 "):
        newest_of(Stepping(""), None)


def test_step_with_a_timed_out_rank_is_not_read() -> None:
    """Rank 0 was held up, so its own waits were met, and all sums are alike."""
    waited = "rank 1 waited 10 s for rank 0 in exchange 27, in order 7 or before"
    with pytest.raises(EngineFailed, match=f"^{waited}"):
        newest_of(Stepping("", (1, 2, 1, 27)), None)


def test_graph_recording_ends_its_wait_when_a_rank_dies() -> None:
    group, stream = Stepping("rank 1 ended"), NeverPassed()
    pool = GraphPool(None, drain=group.drain)
    pool._stream, pool._pool = stream, None  # type: ignore[assignment]
    for wait in (lambda: pool.run("key", lambda: None, keep=True), pool.clear):
        with pytest.raises(EngineFailed, match="rank 1 ended"):
            wait()
    assert "key" not in pool


def test_pages_are_not_saved_after_an_awaited_rank_dies() -> None:
    saved: list[list[int]] = []
    passed: Any = SimpleNamespace(query=lambda: True)
    Stepping("").drained(passed, saved.append)([3])
    save = Stepping("rank 1 ended").drained(NeverPassed(), saved.append)  # type: ignore[arg-type]
    with pytest.raises(EngineFailed, match="rank 1 ended"):
        save([3])
    assert saved == [[3]]


def test_ranks_finish_setup_before_the_first_exchange() -> None:
    """A late signal of a rehearsal would satisfy a wait of the first steps."""
    told: list[object] = []

    class Beginning:
        def finish(self) -> None:
            told.append("finish")

        def order(self, order: RankOrder, *, wait: bool = False) -> None:
            assert wait, "each rank follows before the next order"
            told.append(type(order))

    beginning = Stepping("")
    beginning._ranks = Beginning()  # type: ignore[assignment]
    beginning.peers = SimpleNamespace(device=torch.device("cpu"))  # type: ignore[assignment]
    beginning.agreement = SimpleNamespace(begin=lambda: told.append("rank 0"))  # type: ignore[assignment]
    beginning.begin()
    assert told == ["finish", Settle, Begin, "rank 0"]


def test_dropped_models_are_freed_before_memory_is_counted() -> None:
    asked: list[type] = []

    class Told(RankOrders):
        def order(self, order: RankOrder, *, wait: bool = False) -> None:
            assert wait
            asked.append(type(order))

        def ask(self, order: RankOrder) -> list[str]:
            asked.append(type(order))
            return ["7 9", "5 9"]

    device: Any = SimpleNamespace(_ranks=Told())
    assert CudaDevice._free_of_others(device) == [(7, 9), (5, 9)]
    assert asked == [Drop, ReportMemory]


def test_versions_of_a_model_share_one_rotary_table(tmp_path: Path) -> None:
    """A rank builds a version between two steps, so it must not copy a table then."""
    write_target(tmp_path, shape=SMALLEST)
    placement = Placement(torch.device("meta"), torch.float32, MATMULS["strict"]())
    made = GpuDecoder(ModelConfig.read(tmp_path), placement=placement)
    of_rank = replace(placement, matmuls=placement.matmuls.of_rank(Split(4, 1, 2)))
    [mine] = {id(layer.self_attention.table) for layer in made.layers}
    assert id(made.blank().layers[0].self_attention.table) == mine
    assert id(device_table(made.config, of_rank)) == mine


def test_ranks_waiting_to_meet_notice_a_dead_rank(tmp_path: Path) -> None:
    def check() -> None:
        raise EngineFailed("rank 1 ended")

    with pytest.raises(EngineFailed, match="rank 1 ended"):
        Meeting(tmp_path, 0, 2, 60, check).told("grants")


def test_shard_without_room_is_a_memory_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another place for the weights, or less KV, helps: no trainer is to blame."""

    def short(size: int, device: torch.device) -> SharedGpuMemory:
        raise ChannelLost("cudaMalloc failed (out of memory); trainer and engine must run on one")

    monkeypatch.setattr(SharedGpuMemory, "share", short)
    with pytest.raises(torch.OutOfMemoryError, match="cuda:1 has no room") as raised:
        Arena.shared(2**40, torch.device("cuda", 1))
    assert ran_out(raised.value)


class Made(Arena):
    """Memory of a rank, as many bytes as its number."""

    freed: ClassVar[list[int]] = []

    def free(self) -> None:
        self.freed.append(len(self.content))


class Sharing(Ranks[Any]):
    """Ranks of which one has no room for a shard, or cannot make one of it."""

    moves = True

    def __init__(self, full: int, mute: bool) -> None:
        self._full, self._mute, self._keys, self._lock = full, mute, 0, threading.RLock()
        self._models, self._closers, self.link = deque(), [], self

    def arena(self, rank: int, make: Callable[[], object]) -> Arena | None:
        if rank == self._full:
            raise torch.OutOfMemoryError("out of memory")
        return Made(torch.zeros(rank, dtype=torch.uint8)) if rank else None

    def hand_over(self, *told: object) -> None:
        if self._mute:
            raise torch.OutOfMemoryError("out of memory")


def test_new_model_frees_the_memory_of_its_old_version() -> None:
    class Model:
        def __init__(self, split: Split) -> None:
            self.split = self.of_layers = split

    split = SharedSplit(leaves=2, of=2, ranks=Sharing(9, False))
    first: Any = split.build(Model)
    second, held = first.split.build(Model), weakref.ref(first.split.held)
    del first
    gc.collect()
    assert held() is None and second.split.held is not None


def test_finished_shards_are_freed_when_a_rank_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was handed over is freed once the ranks have dropped the model."""
    monkeypatch.setattr(Made, "freed", [])
    for group in (Sharing(3, False), Sharing(9, True)):
        split = SharedSplit(leaves=4, of=4, ranks=group)
        with pytest.raises(torch.OutOfMemoryError):
            split.build(lambda each: SimpleNamespace(rank=each.rank))
        gc.collect()
        [*dropped] = group._models
        assert [key for key, _ in dropped] == ([1] if group._mute else [])
        for _, free in dropped:
            free()
    assert Made.freed == [1, 2, 1, 2, 3]
