"""Chooses which sequences move to another replica now, and why.

Waiting sequences go where there is room, which costs nothing. Running ones go where they will be
done earlier even though they are read again there, and, if that is wanted, to the fewest replicas
that slow them down by little. `Placer` has the loads; the caller aborts each sequence at its
replica and places it at the one that is named here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tlt_server.frontend.link.placing import PlacedSequence, Placer, ReplicaLoad
from tlt_server.metrics.fleet import MoveReason

COST_S = 0.1  # cost of a move, in addition to reading
REST_S = 30.0  # between two moves of a sequence by choice
MAX_MOVES = 64  # at once, without those of emptied replicas


class Move(NamedTuple):
    """A sequence, the replica that it moves to, and the reason."""

    id: str
    to: str
    reason: MoveReason


class Mover:
    def __init__(self, placer: Placer, *, balance: bool = True, consolidate: float = 0.0) -> None:
        """`consolidate`: how much slower a sequence may become so that replicas are emptied."""
        self._placer, self._balance, self._consolidate = placer, balance, consolidate
        self._moved_s: dict[str, float] = {}  # by id, in order

    def moves(self, now_s: float, may_move: Callable[[str], bool] = lambda id: True) -> list[Move]:
        """Return the moves to make now. `may_move`: False for a sequence that must stay, such as
        one with tokens of an older version.
        """
        while self._moved_s and now_s - next(iter(self._moved_s.values())) >= REST_S:
            del self._moved_s[next(iter(self._moved_s))]
        plan = MovePlan(self._placer, may_move)
        plan.spread_waiting()
        chosen = len(plan.moves)
        plan.may_move = lambda id: id not in self._moved_s and may_move(id)
        kept = plan.consolidate(self._consolidate) if self._consolidate else plan.loads
        if self._balance:
            plan.balance(kept)
        for move in plan.moves[chosen:]:
            self._moved_s[move.id] = now_s
        return plan.moves


class MovePlan:
    """Moves found so far, and the loads after them."""

    def __init__(self, placer: Placer, may_move: Callable[[str], bool]) -> None:
        self.moves, self.may_move, self._placer = list[Move](), may_move, placer
        self.loads: Sequence[ReplicaLoad] = [*placer.loads.values()]
        self._count = Counter({load: load.sequences for load in self.loads})
        self._tokens = Counter({load: load.tokens for load in self.loads})

    @cached_property
    def _own(self) -> dict[ReplicaLoad, dict[str, PlacedSequence]]:
        own: dict[ReplicaLoad, dict[str, PlacedSequence]] = {load: {} for load in self.loads}
        for id, placed in self._placer.placed.items():
            if placed.load in own:
                own[placed.load][id] = placed
        return own

    def _move(self, id: str, at: ReplicaLoad, to: ReplicaLoad, reason: MoveReason) -> None:
        tokens = self._own[at].pop(id).tokens
        self._count[at] -= 1
        self._count[to] += 1
        self._tokens[at] -= tokens
        self._tokens[to] += tokens
        self.moves.append(Move(id, to.name, reason))

    def _token_s(self, load: ReplicaLoad, further: int = 0) -> float:
        return token_s(load, self._count[load] + further, self._tokens[load])

    def _freest(self, among: Iterable[ReplicaLoad]) -> ReplicaLoad:
        return min(among, key=lambda load: (self._token_s(load, 1), load.name))

    def spread_waiting(self) -> None:
        """Move the waiting sequences that would start next to where they can start now."""
        for load in self.loads:
            over = min(load.waiting, self._count[load] - load.places)
            if over <= 0:
                continue
            unstarted = [id for id, own in self._own[load].items() if not own.started]
            for id in unstarted[max(0, len(unstarted) - load.waiting) :][:over]:
                room = [to for to in self.loads if not to.waiting and self._count[to] < to.places]
                if not room or len(self.moves) >= MAX_MOVES:
                    return
                if self.may_move(id):
                    self._move(id, load, self._freest(room), "waiting")

    def balance(self, among: Sequence[ReplicaLoad]) -> None:
        """Move the sequence that gains most to the freest replica, as long as one gains."""
        started = [
            (id, own, index)
            for index, load in enumerate(among)
            for id, own in self._own[load].items()
            if own.started and self.may_move(id)
        ]
        expected_N = np.array([own.expected for _, own, _ in started], float)
        tokens_N = np.array([own.tokens for _, own, _ in started], float)
        at_N = np.array([index for *_, index in started], int)
        while started and len(self.moves) < MAX_MOVES:
            to = self._freest(among)
            faster_L = np.array([self._token_s(load) for load in among]) - self._token_s(to, 1)
            speed = to.pace.speed
            gain_N = expected_N * (faster_L[at_N] - tokens_N * speed.context)
            gain_N -= tokens_N * speed.read
            best = int(gain_N.argmax())
            if gain_N[best] <= COST_S:
                return
            expected_N[best] = 0  # so that it moves once
            self._move(started[best][0], among[at_N[best]], to, "balance")

    def consolidate(self, slower: float) -> Sequence[ReplicaLoad]:
        """Empty as many replicas as possible, and return the others."""
        fullest = sorted(self.loads, key=lambda load: (-self._count[load], load.name))
        count, tokens = self._count.total(), self._tokens.total()
        for few in range(1, len(fullest)):
            kept, all_of = fullest[:few], len(fullest)
            if count <= few * min(load.places for load in kept) and all(
                token_s(load, count / few, tokens / few)
                <= (1.0 + slower) * token_s(load, count / all_of, tokens / all_of)
                for load in kept
            ):
                break
        else:
            return self.loads
        for load in fullest[few:]:
            if all(own.started and self.may_move(id) for id, own in self._own[load].items()):
                for id in [*self._own[load]]:
                    self._move(id, load, self._freest(kept), "consolidate")
        return kept


def token_s(load: ReplicaLoad, count: float, tokens: float) -> float:
    """Return the seconds of a sequence's token at a replica with `count` of them, of `tokens`
    together; those that wait take their turns.
    """
    speed = load.pace.speed
    turns = max(1.0, count / load.places)
    return turns * speed.each + count * speed.shared + tokens * speed.context
