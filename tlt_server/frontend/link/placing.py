"""Chooses the replica of each sequence: the one where it is expected to be done first.

Replicas are alike, so `Speed` models the steps of all and is learned from all their cycles. Prompt
tokens that the sequence's session has left in a replica's cache are not read again. `OpenSequences`
asks and reports; nothing here reads a clock, and equal histories give equal choices.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tlt_server.wire.records import Cycle, GenerateRequest

UNKNOWN_SHARE = 0.25  # output over max_tokens, until it is known
SESSIONS = 2**14  # remembered, the ones used last
CACHES = 8  # replicas remembered for each
FULL = 0.05  # free share of the KV pages when sequences wait for pages, not for a batch slot
PRIOR_S = 0.01  # time of steps with the weight of the prior
MEMORY_S = 20.0  # steps this long ago count 1/e
# Wait for the first end at a full replica, in times that one of its sequences still takes. It is
# short where they began at different times, and long where all began at once.
WAIT = 0.5
SOLVE_S = 0.25  # time of steps between two computations of the speed


class Speed(NamedTuple):
    """Seconds that a replica takes. With n sequences of m tokens together, a token of each takes
    `each + n * shared + m * context`.
    """

    each: float
    shared: float
    context: float
    read: float  # for a prompt token


PRIOR = Speed(each=2.5e-3, shared=3e-5, context=1.5e-8, read=2.5e-5)


class Pace:
    """The learned speed of the replicas, which are alike: least squares over all their steps, in
    multiples of the prior. A speed of its own would stay wrong for a replica that gets nothing.
    """

    def __init__(self) -> None:
        self.speed = PRIOR
        self._products_44, self._sums_4 = PRIOR_S * np.eye(4), PRIOR_S * np.ones(4)
        self._new_s = 0.0

    def stepped(self, cycle: Cycle, replicas: int = 1) -> bool:
        """Learn from a step, or the sum of a few, of one of these. Return True if the speed has
        changed.
        """
        seconds, steps = cycle.step_s, cycle.context
        if not 0.0 < seconds < math.inf:
            return False
        counts = (
            cycle.emitted / steps.decoding if steps.decoding else 0.0,
            cycle.emitted,
            cycle.emitted * steps.mean_context,
            steps.prefill_rows,
        )
        prior_4 = np.array(counts) * PRIOR
        fade = math.exp(-seconds / (MEMORY_S * replicas))
        kept = PRIOR_S * (1.0 - fade)  # the prior does not fade
        self._products_44 *= fade
        self._products_44 += np.outer(prior_4, prior_4) / seconds + kept * np.eye(4)
        self._sums_4 = self._sums_4 * fade + prior_4 + kept
        self._new_s += seconds
        if self._new_s < SOLVE_S * replicas:
            return False
        factors_4 = np.linalg.solve(self._products_44, self._sums_4)
        self.speed = Speed(*(np.clip(factors_4, 0.02, 50.0) * PRIOR).tolist())
        self._new_s = 0.0
        return True


@dataclass(eq=False, slots=True)
class ReplicaLoad:
    """The open sequences of one replica."""

    name: str
    max_running: int
    places: int  # sequences that can run at once; fewer than max_running while KV pages are few
    pace: Pace
    index: int = -1  # among all replicas; -1: it is not one of them
    waiting: int = 0  # sequences that wait for a place, as the replica last said
    sequences: int = 0
    tokens: int = 0  # their prompts and outputs
    expected: int = 0  # output tokens still to come
    unread: int = 0  # tokens to read for sequences that have not started

    def figures(self) -> tuple[float, ...]:
        """Return the expected seconds until one more sequence would be read; per token of it alone,
        and to read; of all tokens of the others, and per token of each.
        """
        each, shared, context, read = self.pace.speed
        other = shared + context * self.tokens / max(1, self.sequences)
        begin_s, over = self.unread * read, self.sequences + 1 - self.places
        if over > 0 and self.sequences:
            turns = WAIT + over / self.places
            begin_s += self.expected / self.sequences * turns * (each + other * self.places)
        others = min(self.sequences, self.places - 1)
        return begin_s, each + shared, read, other * self.expected, other * others


@dataclass(eq=False, slots=True)
class PlacedSequence:
    """An open sequence at its replica."""

    load: ReplicaLoad
    session: tuple[str, str]
    tokens: int  # prompt and output
    left: int  # output tokens that max_tokens still permits
    mean: int  # output tokens of a sequence with this max_tokens
    unread: int  # tokens that its replica had to read
    started: bool = False  # its replica has given tokens

    @property
    def expected(self) -> int:
        """Return the output tokens still expected. The age of a sequence does not change them:
        without a long tail they would be fewer, with one more.
        """
        return min(self.mean, self.left)


class Placer:
    def __init__(self) -> None:
        self.pace = Pace()
        self.loads: dict[str, ReplicaLoad] = {}  # in the order of their names
        self.placed: dict[str, PlacedSequence] = {}
        # Tokens of a session that replicas have read or computed; the one used last at the end.
        self._sessions = OrderedDict[tuple[str, str], dict[ReplicaLoad, int]]()
        self._in_order: list[ReplicaLoad] = []
        self._figures_5L = np.zeros((5, 0))  # `ReplicaLoad.figures` of L loads

    # replicas

    def add(self, name: str, max_running: int) -> ReplicaLoad:
        """Add a replica with an empty cache and no sequences."""
        return self.open(ReplicaLoad(name, max_running, max_running, self.pace))

    def open(self, load: ReplicaLoad) -> ReplicaLoad:
        """Place sequences there. Another one of that name is removed before."""
        self.remove(load.name)
        self.loads[load.name] = load
        self._index()
        return load

    def remove(self, name: str) -> None:
        """Place none there, if it is known. The load still counts those that it has."""
        if name in self.loads:
            self.loads.pop(name).index = -1
            self._index()

    def _index(self) -> None:
        self.loads = dict(sorted(self.loads.items()))
        self._in_order = [*self.loads.values()]
        self._figures_5L = np.zeros((5, len(self.loads)))
        for index, load in enumerate(self._in_order):
            load.index = index
            self._update(load)

    def _update(self, load: ReplicaLoad) -> None:
        if load.index >= 0:
            self._figures_5L[:, load.index] = load.figures()

    def forget(self) -> None:
        """Forget all caches, since the weights have changed."""
        self._sessions.clear()

    def stepped(self, name: str, cycle: Cycle | None, gauges: Mapping[str, float]) -> None:
        """Learn from steps of a replica, and from its gauges after them."""
        load = self.loads.get(name)
        if load is None:
            return
        load.waiting, before = int(gauges.get("waiting", 0.0)), load.places
        full = gauges.get("pages_free", math.inf) < FULL * gauges.get("pages", 0.0)
        running = int(gauges.get("running", 0.0))
        load.places = max(1, running) if full and load.waiting else load.max_running
        if cycle is not None and self.pace.stepped(cycle, len(self.loads)):
            for each in self._in_order:
                self._update(each)
        elif load.places != before:
            self._update(load)

    # sequences

    def place(
        self,
        request: GenerateRequest,
        tokens: int = 0,
        share: float = 0.0,
        among: Collection[str] | None = None,
    ) -> str | None:
        """Choose a replica, among these if any are given, and count the sequence there. `tokens`:
        its output so far; `share`: of max_tokens that sequences use, 0 if unknown. Return None if
        there is no replica. A sequence that was placed before moves.
        """
        self.ended(request.id)
        limit, size = request.sampling.max_tokens, len(request.token_ids) + tokens
        mean, left = math.ceil((share or UNKNOWN_SHARE) * limit), max(0, limit - tokens)
        session = request.tenant, request.group_id
        cached = self._sessions.get(session, {})
        seconds_L = self._seconds(min(mean, left), size, cached)
        if among is not None:
            for name in self.loads.keys() - among:
                seconds_L[self.loads[name].index] = math.inf
        index = int(seconds_L.argmin()) if self.loads else -1
        if index < 0 or seconds_L[index] == math.inf:
            return None
        load = self._in_order[index]
        placed = PlacedSequence(
            load, session, size, left, mean, size - min(size, cached.get(load, 0))
        )
        self.placed[request.id] = placed
        load.sequences += 1
        load.tokens += size
        load.expected += placed.expected
        load.unread += placed.unread
        self._read(placed)
        self._update(load)
        return load.name

    def _seconds(
        self, expected: int, size: int, cached: Mapping[ReplicaLoad, int]
    ) -> NDArray[np.float64]:
        """Return the expected seconds until such a sequence would be done at each replica, which
        every other one there slows down until one of the two is done.
        """
        begin_L, alone_L, read_L, others_L, per_token_L = self._figures_5L
        seconds_L = np.minimum(expected * per_token_L, others_L)
        seconds_L += begin_L + expected * alone_L + size * read_L
        for load, tokens in cached.items():
            if load.index >= 0:
                seconds_L[load.index] -= min(size, tokens) * load.pace.speed.read
        return seconds_L

    def took(self, id: str, tokens: int) -> None:
        """Count the tokens of an output, unless the sequence is unknown."""
        placed = self.placed.get(id)
        if placed is None or not tokens:
            return
        load, before = placed.load, placed.expected
        placed.tokens += tokens
        placed.left = max(0, placed.left - tokens)
        load.tokens += tokens
        load.expected += placed.expected - before
        load.unread -= 0 if placed.started else placed.unread
        placed.started = True
        self._update(load)

    def ended(self, id: str) -> None:
        """Count a sequence no longer, unless it is unknown."""
        placed = self.placed.pop(id, None)
        if placed is None:
            return
        placed.load.sequences -= 1
        placed.load.tokens -= placed.tokens
        placed.load.expected -= placed.expected
        if placed.started:
            self._read(placed)
        else:
            placed.load.unread -= placed.unread
        self._update(placed.load)

    def _read(self, placed: PlacedSequence) -> None:
        """Note that its replica has the sequence in its cache before it reads a later one."""
        cached = self._sessions.setdefault(placed.session, {})
        self._sessions.move_to_end(placed.session)
        cached[placed.load] = max(placed.tokens, cached.pop(placed.load, 0))
        if len(cached) > CACHES:
            del cached[next(iter(cached))]
        if len(self._sessions) > SESSIONS:
            self._sessions.popitem(last=False)

    def check(self) -> None:
        """Assert every invariant."""
        assert [*self.loads] == sorted(self.loads)
        for index, load in enumerate(self.loads.values()):
            own = [placed for placed in self.placed.values() if placed.load is load]
            unread = sum(placed.unread for placed in own if not placed.started)
            expected = sum(placed.expected for placed in own)
            tokens = sum(placed.tokens for placed in own)
            sums = load.index, load.sequences, load.tokens, load.expected, load.unread
            assert sums == (index, len(own), tokens, expected, unread), "the sums leak"
            assert tuple(self._figures_5L[:, index]) == load.figures(), "figures are out of date"
        assert len(self._sessions) <= SESSIONS, "too many sessions"
        assert all(len(cached) <= CACHES for cached in self._sessions.values())
