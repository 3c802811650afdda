"""Chooses which sequences move to another replica now, and why.

Sequences of drained replicas leave. Waiting ones go where there is room, which costs nothing.
Running ones go where they will be done earlier even though they are read again there, and, if
that is wanted, to the fewest replicas that slow them down by little. `Placer` has the loads; the
caller aborts each sequence at its replica and places it among the one that is named here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Literal, NamedTuple

from tlt_server.frontend.link.placing import PlacedSequence, Placer, ReplicaLoad

COST_S = 0.1  # cost of a move, in addition to reading
REST_S = 30.0  # between two moves of a sequence by choice
MAX_MOVES = 64  # at once, without those of drained replicas

Reason = Literal["drained", "waiting", "balance", "consolidate"]


class Move(NamedTuple):
    """A sequence, the replica that it moves to, and the reason."""

    id: str
    to: str
    reason: Reason


class Mover:
    def __init__(self, placer: Placer, *, balance: bool = True, consolidate: float = 0.0) -> None:
        """`consolidate`: how much slower a sequence may become so that replicas are emptied."""
        self._placer, self._balance, self._consolidate = placer, balance, consolidate
        self._moved_s: dict[str, float] = {}  # by id, in order

    def moves(
        self, now_s: float, draining: Collection[str] = (), fixed: Iterable[str] = ()
    ) -> list[Move]:
        """Return the moves to make now. `draining`: replicas to empty; `fixed`: ids that must stay,
        such as those with tokens of an older version.
        """
        while self._moved_s and now_s - next(iter(self._moved_s.values())) >= REST_S:
            del self._moved_s[next(iter(self._moved_s))]
        plan = MovePlan(self._placer, draining, fixed)
        plan.drain()
        plan.spread_waiting()
        chosen = len(plan.moves)
        plan.fixed |= self._moved_s.keys()
        kept = plan.consolidate(self._consolidate) if self._consolidate else plan.open
        if self._balance:
            plan.balance(kept)
        for move in plan.moves[chosen:]:
            self._moved_s[move.id] = now_s
        return plan.moves


class MovePlan:
    """Moves found so far, and the loads after them."""

    def __init__(self, placer: Placer, draining: Collection[str], fixed: Iterable[str]) -> None:
        self.moves, self.fixed = list[Move](), {*fixed}
        loads = placer.loads.values()
        self.open = [load for load in loads if load.name not in draining]
        self._draining = [load for load in loads if load.name in draining]
        self._own: dict[ReplicaLoad, dict[str, PlacedSequence]] = {load: {} for load in loads}
        for id, placed in placer.placed.items():
            if placed.load in self._own:
                self._own[placed.load][id] = placed
        self._count = Counter({load: load.sequences for load in loads})
        self._tokens = Counter({load: load.tokens for load in loads})

    def _move(self, id: str, at: ReplicaLoad, to: ReplicaLoad, reason: Reason) -> None:
        tokens = self._own[at].pop(id).tokens
        self._count[at] -= 1
        self._count[to] += 1
        self._tokens[at] -= tokens
        self._tokens[to] += tokens
        self.moves.append(Move(id, to.name, reason))

    def _token_s(self, load: ReplicaLoad, further: int = 0, tokens: int = 0) -> float:
        return token_s(load, self._count[load] + further, self._tokens[load] + tokens)

    def _freest(self, among: Iterable[ReplicaLoad]) -> ReplicaLoad:
        return min(among, key=lambda load: (self._token_s(load, 1), load.name))

    def drain(self) -> None:
        for load in self._draining if self.open else ():
            for id in [id for id in self._own[load] if id not in self.fixed]:
                self._move(id, load, self._freest(self.open), "drained")

    def spread_waiting(self) -> None:
        """Move the waiting sequences that would start next to where they can start now."""
        for load in self.open:
            unstarted = [id for id, own in self._own[load].items() if not own.started]
            over = max(0, min(load.waiting, self._count[load] - load.places))
            for id in unstarted[max(0, len(unstarted) - load.waiting) :][:over]:
                room = [to for to in self.open if not to.waiting and self._count[to] < to.places]
                if not room or len(self.moves) >= MAX_MOVES:
                    return
                if id not in self.fixed:
                    self._move(id, load, self._freest(room), "waiting")

    def balance(self, among: Collection[ReplicaLoad]) -> None:
        """Move the sequence with the largest gain from the slowest replica to the freest one, as
        long as there is a gain.
        """
        while among and len(self.moves) < MAX_MOVES:
            to = self._freest(among)
            slower = [load for load in among if self._token_s(load) > self._token_s(to, 1)]
            for at in sorted(slower, key=lambda load: (-self._token_s(load), load.name)):
                gains = (
                    (self._gain_s(own, at, to), id)
                    for id, own in self._own[at].items()
                    if own.started and id not in self.fixed
                )
                gain_s, id = max(gains, default=(0.0, ""))
                if gain_s > 0.0:
                    self.fixed.add(id)
                    self._move(id, at, to, "balance")
                    break
            else:
                return

    def _gain_s(self, own: PlacedSequence, at: ReplicaLoad, to: ReplicaLoad) -> float:
        faster_s = self._token_s(at) - self._token_s(to, 1, own.tokens)
        return own.expected * faster_s - own.tokens * to.pace.speed.read - COST_S

    def consolidate(self, slower: float) -> Collection[ReplicaLoad]:
        """Empty as many replicas as possible, and return the others."""
        fullest = sorted(self.open, key=lambda load: (-self._count[load], load.name))
        count, tokens = (
            sum(each[load] for load in fullest) for each in (self._count, self._tokens)
        )
        for few in range(1, len(fullest)):
            kept, all_of = fullest[:few], len(fullest)
            if count <= few * min(load.places for load in kept) and all(
                token_s(load, count / few, tokens / few)
                <= (1.0 + slower) * token_s(load, count / all_of, tokens / all_of)
                for load in kept
            ):
                break
        else:
            return self.open
        for load in fullest[few:]:
            if all(own.started and id not in self.fixed for id, own in self._own[load].items()):
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
