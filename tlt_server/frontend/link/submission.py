"""The way of sequences to an engine, and of their outputs back to a request's `Submission`.

`sequences` adds outputs to it, and a generation reads them. A `Route` is the way of one sequence,
an `EngineQueue` has the batches for one engine. Work on thousands of sequences is done a piece at a
time, so that other requests run in between. A request that may have crashed the engine runs on
trial: nothing new follows until it has more tokens than at the crash, or has ended.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Struct

from tlt_server.wire.commands import Command
from tlt_server.wire.records import GenerateRequest, StepOutput

HOP = "~"  # between an id and the number of the sequence's move; no id has it


class Submission:
    """The outputs that were not read yet, by sequence."""

    def __init__(
        self, ids: Sequence[str], close: Callable[[Submission], None], *, resumes: bool = False
    ) -> None:
        """`resumes`: the sequences continue after a death of the engine."""
        self.open = set(ids)
        self.resumes = resumes
        self._outputs: OrderedDict[str, list[StepOutput]] = OrderedDict()
        self._some = asyncio.Event()
        self._close = close
        self._timer: asyncio.TimerHandle | None = None

    def put(self, output: StepOutput) -> None:
        if output.id not in self.open:
            return
        if output.finish_reason is not None:
            self.open.discard(output.id)
            if not self.open and self._timer is not None:
                self._timer.cancel()
        self._outputs.setdefault(output.id, []).append(output)
        self._some.set()

    def expire_at(self, when: float, expire: Callable[[], None]) -> None:
        self._timer = asyncio.get_running_loop().call_later(
            max(0.0, when - time.monotonic()), expire
        )

    async def slices(
        self, size_of: Callable[[StepOutput], int], limit: int
    ) -> AsyncIterator[tuple[list[StepOutput], int]]:
        """Yield the new outputs in slices that end when their size reaches `limit`, each with its
        size, until every sequence has ended. The outputs of a sequence keep their order and stay
        together, so that each chunk of a stream has as many tokens as possible.
        """
        while self.open or self._outputs:
            await self._some.wait()
            self._some.clear()
            arrived, self._outputs = self._outputs, OrderedDict()
            few: list[StepOutput] = []
            size = 0
            while arrived:
                _, outputs = arrived.popitem(last=False)
                for output in outputs:
                    few.append(output)
                    size += size_of(output)
                    if size >= limit:
                        yield few, size
                        few, size = [], 0
            if few:
                yield few, size

    def close(self) -> None:
        """Abort the sequences that have not ended; the engine's answers to that are dropped."""
        if self._timer is not None:
            self._timer.cancel()
        self._close(self)


class Holder(Protocol):
    """A replica, as its sequences see it."""

    queue: EngineQueue

    def send(self, command: Command) -> bool: ...


class Route(Struct, gc=False):
    """Routes a sequence from its replica to its submission."""

    submission: Submission
    request: GenerateRequest
    replica: Holder | None = None  # has it, or will get it; None: it waits for a replica
    hops: int = 0  # replicas of a fleet that had it before
    accepted_s: float = 0.0  # time.monotonic()
    last_s: float = 0.0  # likewise, of the last output with tokens; 0: there was none
    tokens: int = 0  # tokens given so far
    stepped: bool = False  # the engine that has it now gave some of them
    generated: list[int] = []  # these tokens, of a sequence that can resume; not the request's own
    held: bool = False  # the sequence waits here, and no engine knows it
    ending: str = ""  # the finish reason that an abort asked for
    crashed: bool = False  # it ran when an engine ended
    lost: bool = False  # it was at a replica that was lost for an unknown reason
    version: str = ""  # the weights that computed its last tokens
    mixed: bool = False  # others computed tokens before those

    @property
    def is_open(self) -> bool:
        """Return False once the client has left."""
        return self.request.id in self.submission.open

    @property
    def size(self) -> int:
        """The tokens that another replica has to read."""
        return len(self.request.token_ids) + len(self.request.generated) + self.tokens

    @property
    def on_trial(self) -> bool:
        """Return True while nothing new follows it to its replica."""
        return self.replica is not None and self.replica.queue.on_trial == self.request.id

    @property
    def sent_as(self) -> str:
        """The id by which its replica knows it. A late output of an earlier replica has another."""
        return f"{self.request.id}{HOP}{self.hops}" if self.hops else self.request.id

    def take(self, output: StepOutput) -> None:
        """Count an output."""
        if output.token_ids:
            self.tokens += len(output.token_ids)
            self.stepped = True
            if self.submission.resumes:
                self.generated += output.token_ids
            if output.weight_version != self.version:
                self.mixed |= bool(self.version)
                self.version = output.weight_version

    def rest(self) -> GenerateRequest:
        """Return the request by which an engine starts or continues the sequence. After a crash it
        is not patient: if it ends the engine again, its tokens up to there have come.
        """
        if not self.generated and not self.hops:
            return self.request
        return msgspec.structs.replace(
            self.request,
            id=self.sent_as,
            generated=[*self.request.generated, *self.generated],
            begin_by_s=None if self.generated else self.request.begin_by_s,
            patient=self.request.patient and not self.crashed,
        )


# Limits on what is sent to the engine at once; on a slow core it takes up to 2 ms.
SLICE_REQUESTS = 256
SLICE_IDS = 2**16
PIECE = 256  # members worked on in one pass; on a slow core that takes up to 2 ms
T = TypeVar("T")


class _Chore(NamedTuple):
    members: deque[Any]
    work: Callable[[list[Any]], None]
    end: Callable[[], None]


class Chores:
    def __init__(self) -> None:
        self._chores: deque[_Chore] = deque()

    def add(
        self,
        members: Sequence[T],
        work: Callable[[list[T]], None],
        end: Callable[[], None] = lambda: None,
    ) -> None:
        """Call `work` with all members, at most `PIECE` at once, and then `end`. The first call is
        made now, unless an earlier chore is running.
        """
        self._chores.append(_Chore(deque(members), work, end))
        if len(self._chores) == 1:
            self._go_on()

    def _go_on(self) -> None:
        room = PIECE
        try:
            while self._chores and room > 0:
                members, work, end = self._chores[0]
                few = [members.popleft() for _ in range(min(room, len(members)))]
                room -= len(few)
                if few:
                    work(few)
                if not members:
                    try:
                        end()
                    finally:  # what fails is not tried again for ever
                        self._chores.popleft()
        finally:
            if self._chores:
                asyncio.get_running_loop().call_soon(self._go_on)


class EngineQueue:
    """The batches of one engine, in order."""

    def __init__(
        self,
        routes: Mapping[str, Route],
        hand_over: Callable[[list[Route]], None],
        trial_tokens: Callable[[GenerateRequest], int],
    ) -> None:
        """`routes`: the open sequences, by id. `hand_over` sends these to the engine.
        `trial_tokens` returns the tokens that a request on trial must exceed.
        """
        self._routes, self._hand_over, self._tokens_of = routes, hand_over, trial_tokens
        self._batches = deque[tuple[list[GenerateRequest], bool]]()  # True: one request, on trial
        self._trial_tokens = 0
        self._pause: asyncio.Handle | None = None  # the end of the others' turn
        self.on_trial = ""  # id

    def add(self, batch: list[GenerateRequest]) -> None:
        self._batches.append((batch, False))
        self._advance()

    def add_trials(self, requests: list[GenerateRequest]) -> None:
        self._batches += [([request], True) for request in requests]
        self._advance()

    @property
    def trying(self) -> bool:
        """Return True while a request is on trial here, or will be."""
        return bool(self.on_trial) or any(trial for _, trial in self._batches)

    def clear(self) -> None:
        self._batches.clear()
        self.on_trial = ""

    def reached(self, id: str, tokens: float = math.inf) -> None:
        """Note how far a sequence is, which may end its trial; without `tokens` it has ended."""
        if id == self.on_trial and tokens > self._trial_tokens:
            self.on_trial = ""
            self._advance()

    def _advance(self) -> None:
        """Send the next requests, up to an unfinished trial. Other requests run between slices."""
        while self._batches and not self.on_trial and self._pause is None:
            batch, trial = self._batches.popleft()
            batch, rest = self._slice(batch)
            if rest:
                self._batches.appendleft((rest, False))
                self._pause = asyncio.get_running_loop().call_soon(self._go_on)
            left = [route for each in batch if (route := self._routes.get(each.id)) is not None]
            left = [route for route in left if route.is_open and not route.ending]
            if left:
                first = left[0].request
                self.on_trial = first.id if trial else ""
                self._trial_tokens = self._tokens_of(first) if trial else 0
                self._hand_over(left)

    def _slice(
        self, batch: list[GenerateRequest]
    ) -> tuple[list[GenerateRequest], list[GenerateRequest]]:
        """Return the part of a batch to send at once, and the rest."""
        ids = 0
        for i, request in enumerate(batch):
            route = self._routes.get(request.id)
            ids += len(request.token_ids) + len(request.generated)
            ids += len(route.generated) if route is not None else 0
            if i and (i == SLICE_REQUESTS or ids > SLICE_IDS):
                return batch[:i], batch[i:]
        return batch, []

    def _go_on(self) -> None:
        self._pause = None
        self._advance()
