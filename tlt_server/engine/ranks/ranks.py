"""The ranks of a target that several processes share, as rank 0 sees them.

`Ranks` starts the workers, sends them orders and detects their death; a device's `RankLink`
exchanges with them. A rank that dies, hangs or differs ends the epoch with one error: the
supervisor starts the next epoch, and requests continue with the same tokens.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import torch
import zmq

from tlt_server.engine.exchange.meeting import meeting_folder
from tlt_server.engine.ranks import orders
from tlt_server.engine.ranks import processes as rank_processes
from tlt_server.engine.ranks.answers import POLL_S, RankAnswers
from tlt_server.engine.ranks.arena import Arena
from tlt_server.engine.ranks.orders import Copiers, Envelope, RankOrder, RankOrders, RankStart
from tlt_server.engine.settings import DecidedSettings, encode_settings
from tlt_server.errors import EngineFailed, Unavailable
from tlt_server.models.environment import NO_MULTICAST
from tlt_server.models.split import RankExchange

Taken = TypeVar("Taken")
RANK = "tlt_server.engine.ranks.rank"
SEND_S = 10.0  # for room in a rank's socket
BEAT_S = 3.0  # between two checks whether idle ranks live


class RankLink(Protocol):
    """A device's part of `Ranks`: the exchange of this rank with the others."""

    moves: bool  # whether a sleep takes memory of shards that is then at another address
    answer_s: float  # an answer is awaited so long once all are ready

    @property
    def exchange(self) -> RankExchange: ...

    def arena(self, rank: int, make: Callable[[], Any]) -> Arena | None:
        """Return memory, which the rank can map, for the model that `make` builds on the meta
        device; None if this rank has the same model.
        """

    def ready(self) -> None:
        """Shorten the waits from now on."""

    def close(self) -> None:
        """Free memory that the workers read; they have ended."""


Link = TypeVar("Link", bound=RankLink)


class SavedOnRanks:
    """Saved pages of this rank, and the key of the same pages on the workers."""

    def __init__(self, key: int, own: object) -> None:
        self.key, self.own = key, own


class Ranks(RankOrders, Generic[Link]):
    def __init__(
        self, settings: DecidedSettings, connect: Callable[[Ranks[Any], Path], Link]
    ) -> None:
        """Start the workers and join them by `connect`, in a shared directory. `EngineFailed` if
        one does not start in time.
        """
        self.count, self._threads = settings.tensor_parallel, settings.rank_threads
        self._epoch, self.sent = secrets.token_hex(8), 0  # the number of the newest order
        self._lock = threading.RLock()  # the staging thread sends, too
        # Keys of models to be dropped, each with what frees its memory; garbage of any thread.
        self._models: deque[tuple[int, Callable[[], None]]] = deque()
        self._freed: list[tuple[int, Callable[[], None]]] = []  # once this order is followed
        self._saved: deque[int] = deque()
        self._keys, self._starting = 0, True
        self._beaten, self._quiet_s, self._looked_s = 0, 0.0, 0.0  # an order that awaits answers
        self._context = zmq.Context()
        self._sockets: list[socket.socket | zmq.Socket[bytes]] = []
        self._sides: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._begun: deque[int] = deque()  # orders whose answers are awaited later
        self._closers: list[Callable[[], None]] = []  # free the memory that the other ranks read
        self._end = weakref.finalize(
            self, _ended, self._processes, self._sockets, self._context, self._closers
        )
        with meeting_folder(settings.directory) as directory:
            others = range(1, self.count)
            self._orders = [self._bound(zmq.PUSH, directory / str(rank)) for rank in others]
            inbox = self._bound(zmq.PULL, directory / "0")
            self._answers = RankAnswers(inbox, self.count - 1, self.check_ended)
            for rank in others:
                self._launch(settings, directory, rank)
            self._met("begin")  # so the exchange waits for none that cannot
            self.link = connect(self, directory)
            self._closers.append(self.link.close)
            self._met("join")  # so none reads the directory any more

    def _met(self, what: str) -> None:
        """Wait until all ranks have reached this point."""
        self._answers.expect(0, what)
        self._answers.of(0)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """End the workers; the end of this process does too."""
        self._end()

    def _bound(self, kind: int, path: Path) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        self._sockets.append(made)
        made.setsockopt(zmq.LINGER, 0)
        made.bind(f"ipc://{path}")
        return made

    def _launch(self, settings: DecidedSettings, directory: Path, rank: int) -> None:
        start = RankStart(
            epoch=self._epoch,
            rank=rank,
            ranks=self.count,
            device=settings.device,
            directory=str(directory),
            # No settings may name the device of tests, so it is told apart.
            settings=encode_settings(replace(settings, device="cpu")).decode(),
            threads=self._threads,
        )
        mine, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", RANK, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **NO_MULTICAST},
            )
        self._sides.append(mine)
        self._sockets.append(mine)
        self._processes.append(process)
        assert process.stdin is not None
        try:
            with process.stdin as line:
                line.write(msgspec.json.encode(start) + b"\n")
        except ConnectionError:
            self.check_ended(left=True)
            raise EngineFailed(f"rank {rank} has died before it read its settings") from None

    # -- orders ------------------------------------------------------------------------------------

    def order(self, order: RankOrder, *, wait: bool = False) -> None:
        self.ask(order) if wait else self._send(order, asks=False)

    def confirm(self) -> None:
        self.ask(orders.Beat())

    def ask(self, order: RankOrder) -> list[str]:
        with self._lock:
            return self.answered(self._send(order, asks=True))

    def begin(self, order: RankOrder) -> None:
        self._begun.append(self._send(order, asks=True))

    def done(self) -> bool:
        with self._lock:
            while self._begun and self._answers.complete(self._begun[0]):
                self.answered(self._begun.popleft())
        return not self._begun

    def finish(self) -> None:
        refused: Unavailable | None = None
        while self._begun:
            try:
                self.answered(self._begun.popleft())
            except Unavailable as error:
                refused = error
        if refused is not None:
            raise refused

    def _send(self, order: RankOrder, *, asks: bool) -> int:
        with self._lock:
            if self._models or self._saved:
                models = _taken(self._models)
                gone = orders.Drop([key for key, _ in models], _taken(self._saved))
                number = self._post(gone, asks=False)
                self._freed += [(number, free) for _, free in models]
            return self._post(order, asks=asks)

    def _post(self, order: RankOrder, *, asks: bool) -> int:
        self.sent += 1
        if asks:
            self._answers.expect(self.sent, type(order).__name__)
        data = orders.encoded(Envelope(self._epoch, self.sent, asks, order))
        for rank, each in enumerate(self._orders, 1):
            until_s = time.monotonic() + SEND_S
            while not each.poll(int(1000 * POLL_S), zmq.POLLOUT):
                self.check_ended()
                if time.monotonic() > until_s:
                    raise EngineFailed(
                        f"rank {rank} did not take order {self.sent} ({type(order).__name__}) in "
                        f"{SEND_S:g} s: its socket is full"
                    )
            each.send(data)
        return self.sent

    def answered(self, number: int) -> list[str]:
        """Return the texts of all ranks' answers to this order. Raises as `RankOrders.order`
        does.
        """
        with self._lock:
            texts = self._answers.of(number)
            for _, free in (each for each in self._freed if each[0] < number):
                free()
            self._freed = [each for each in self._freed if each[0] >= number]
            return texts

    def ready(self) -> None:
        self._starting, self._looked_s = False, time.monotonic()
        self._answers.patience_s = self.link.answer_s
        self.link.ready()

    def check(self) -> None:
        self.check_ended()
        if self._starting or not self._lock.acquire(blocking=False):
            return  # another thread waits for an answer
        try:
            self._beat()
        finally:
            self._lock.release()

    def _beat(self) -> None:
        """Check periodically whether all ranks are alive: steps show it, but an engine may be
        idle.
        """
        now_s = time.monotonic()
        # While this process was busy the others may have been, too.
        self._quiet_s += min(now_s - self._looked_s, BEAT_S)
        self._looked_s = now_s
        if not self._beaten:
            if self._quiet_s > BEAT_S:
                self._beaten, self._quiet_s = self._send(orders.Beat(), asks=True), 0.0
        elif self._answers.complete(self._beaten):
            self.answered(self._beaten)  # frees what was dropped before it
            self._beaten, self._quiet_s = 0, 0.0
        elif self._quiet_s > self.link.answer_s - BEAT_S:
            self._answers.give_up(self._beaten, self.link.answer_s - BEAT_S)

    def check_ended(self, *, left: bool = False) -> None:
        """Errors as of `rank_processes.check`."""
        rank_processes.check(self._processes, left=left)

    # -- models and pages --------------------------------------------------------------------------

    def new_key(self) -> int:
        with self._lock:
            self._keys += 1
            return self._keys

    def hand_over(self, arenas: Sequence[Arena], order: orders.LoadShard | orders.MapShard) -> None:
        """Send each rank its memory, and the order that uses it."""
        with self._lock:
            for rank, (side, arena) in enumerate(zip(self._sides, arenas, strict=True), 1):
                data = order.key.to_bytes(8, "little") + arena.grant
                try:
                    socket.send_fds(side, [data], arena.descriptors)
                except ConnectionError:
                    self.check_ended(left=True)
                    raise EngineFailed(
                        f"rank {rank} has died before it mapped its memory"
                    ) from None
                arena.close()
            self.order(order, wait=order.waits)

    def drop_model(self, key: int, arenas: Sequence[Arena]) -> None:
        """Tell the ranks to drop a model that this process has dropped; any thread may call
        this.
        """
        closers = self._closers

        def free() -> None:
            closers.remove(free)
            for arena in arenas:
                arena.free()

        closers.append(free)
        self._models.append((key, free))

    def copiers(self, *own: *Copiers) -> Copiers:
        own_save, own_restore = own

        def save(pages: list[int]) -> SavedOnRanks:
            key = self.new_key()
            self.order(orders.Save(key, pages))
            saved = SavedOnRanks(key, own_save(pages))
            weakref.finalize(saved, self._saved.append, key)
            return saved

        def restore(saved: SavedOnRanks, pages: list[int]) -> None:
            self.order(orders.Restore(saved.key, pages))
            own_restore(saved.own, pages)

        return save, restore


def reclaim_on(ranks: RankOrders, free_own: Callable[[], None]) -> None:
    """Allocate the pages' memory again on the workers after this rank. If one is out of memory,
    nothing stays allocated: `torch.OutOfMemoryError`.
    """
    try:
        ranks.order(orders.ReclaimPages(), wait=True)
    except torch.OutOfMemoryError:
        ranks.order(orders.FreePages(), wait=True)
        free_own()
        raise


def _taken(keys: deque[Taken]) -> list[Taken]:
    return [keys.popleft() for _ in range(len(keys))]


def _ended(
    processes: list[subprocess.Popen[bytes]],
    sockets: list[socket.socket | zmq.Socket[bytes]],
    context: zmq.Context[Any],
    closers: list[Callable[[], None]],
) -> None:
    """Kill all processes: a rank has nothing to save. Then close the shared memory, which has no
    more readers.
    """
    rank_processes.end(processes)
    for each in sockets:  # a context that ends waits for all of its sockets
        each.close()
    context.term()
    for close in [*closers]:
        close()
