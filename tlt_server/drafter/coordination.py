"""The decisions of a gateway that trains one drafter for its fleet, from the states of replicas to
actions. No I/O and no clock, so a test can simulate the replicas.

At most one replica trains, an idle one. It stops training once it is busy. The others' training is
paused; pauses expire by themselves, so each decision renews them. When the training replica adopts
a drafter, every replica gets that drafter under the same version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_REFUSALS = 3  # pushes of one version
CANNOT_TRAIN = ("", "failed")
AT_WORK = ("training", "evaluating", "adopting")


class Seen(NamedTuple):
    """One replica that answered."""

    name: str
    load: int  # open sequences; 0 where the trainer does not stop for them
    trainer: str  # its state; empty: it records nothing
    rounds: int  # rounds of training that have ended and had something to train on
    target: str  # weight versions
    drafter: str
    trained: bool = False  # whether a trainer made this drafter for this target
    held: bool = False  # whether its trainer is in a pause that ends by itself
    reason: str = ""  # for the trainer's state


class LetTrain(NamedTuple):
    """Allow this replica to train on the sequences of all."""

    name: str
    again: bool = False  # it was let, but has begun nothing yet


class StopTraining(NamedTuple):
    """Forbid this replica to train, for a while."""

    name: str
    reason: str
    again: bool = False  # it is held already


class GiveSamples(NamedTuple):
    """Send this replica the sequences of the others."""

    name: str


class ShareDrafter(NamedTuple):
    """Push this replica's drafter to all."""

    name: str
    target: str
    version: str


Action = LetTrain | StopTraining | GiveSamples | ShareDrafter


@dataclass
class Coordination:
    quiet_s: float = 5.0  # for which a replica must be idle before it trains
    training: str = ""  # the replica that trains; empty: none
    last: str = ""  # the one that trained last
    shared: ShareDrafter | None = None  # the drafter that all are given
    rounds: int = 0  # rounds ended at the training replica since it began
    notes: dict[str, str] = field(default_factory=dict)  # replica -> why it takes no part
    _before: Seen | None = None  # the training replica as it began, or adopted
    _idle_from: dict[str, float] = field(default_factory=dict)
    _refusals: Counter[str] = field(default_factory=Counter)  # by version

    def decide(self, seen: Sequence[Seen], now_s: float) -> list[Action]:
        """Return the actions for the replicas that answered, in order. Each is carried out, or has
        failed, before the next decision.
        """
        target = _common_target(seen)
        self.notes = {server.name: note for server in seen if (note := _note(server, target))}
        seen = [server for server in seen if server.target == target]
        by_name = {server.name: server for server in seen}
        idle = {server.name for server in seen if not server.load}
        self._idle_from = {name: self._idle_from.get(name, now_s) for name in by_name.keys() & idle}
        if self.shared and seen and self.shared.target != target:
            self.shared = None  # it was made for weights that are gone
        actions: list[Action] = []
        if self.training:
            actions += self._look_after(by_name.get(self.training))
        chosen = None if self.training else self._chosen(seen, idle, now_s)
        if chosen is not None:
            self.training = self.last = chosen.name
            self._before, self.rounds = chosen, 0
            actions.append(LetTrain(chosen.name))
        stopped = {action.name for action in actions if isinstance(action, StopTraining)}
        for server in seen:
            if server.name == self.training:
                idles = server.trainer == "idle" and not self.rounds
                again = LetTrain(server.name, again=True)
                given = again if idles else GiveSamples(server.name)
                actions += [] if server is chosen else [given]
            elif server.trainer != "adopting" and not _stands_still(server):
                pause = StopTraining(server.name, "one replica trains at a time", server.held)
                actions += [] if server.name in stopped else [pause]
        return actions + self._shares(seen)

    def refused(self, version: str) -> None:
        """Count a push of a drafter that was rejected."""
        self._refusals[version] += 1

    def put_off(self, name: str) -> None:
        """Prefer other replicas to this one, which did not start to train."""
        self.training = self.last = ""
        self._idle_from.pop(name, None)

    def _look_after(self, server: Seen | None) -> list[Action]:
        """Record the training replica's adopted drafter, and decide whether training continues."""
        assert self._before is not None
        if server is None or _stands_still(server) or server.held:
            self.training = ""
            return []
        if server.target != self._before.target:
            self._before = server  # a push to it; the drafter may have come with it
        elif server.trained and server.drafter != self._before.drafter:
            self.shared = ShareDrafter(server.name, server.target, server.drafter)
            self._before = self._before._replace(drafter=server.drafter)
        self.rounds = max(0, server.rounds - self._before.rounds)
        if server.trainer == "adopting" or not server.load:
            return []
        self.training = ""
        return [StopTraining(server.name, f"{server.load} sequences are open")]

    def _chosen(self, seen: Sequence[Seen], idle: set[str], now_s: float) -> Seen | None:
        """Return the replica to train: the last one if it is eligible, else the one idle for
        longest.
        """
        able = [
            server
            for server in seen
            if server.name in idle
            and not self._lacks(server)
            and not _stands_still(server)
            and now_s - self._idle_from[server.name] >= self.quiet_s
        ]
        return min(
            able,
            key=lambda server: (server.name != self.last, self._idle_from[server.name]),
            default=None,
        )

    def _lacks(self, server: Seen) -> bool:
        """Return True if a replica is to get the shared drafter."""
        shared = self.shared
        if shared is None or self._refusals[shared.version] >= MAX_REFUSALS:
            return False
        return server.drafter != shared.version

    def _shares(self, seen: Sequence[Seen]) -> list[Action]:
        lacking = [server for server in seen if self._lacks(server)]
        if self.shared is None or not lacking:
            return []
        having = [server.name for server in seen if server not in lacking]
        if not having:
            self.shared = None  # it was rolled back, or replaced
            return []
        if self.shared.name not in having:
            self.shared = self.shared._replace(name=having[0])
        return [self.shared]


def _common_target(seen: Sequence[Seen]) -> str:
    """Return the most common target version; the first one of a tie."""
    counted = Counter(server.target for server in seen)
    return counted.most_common(1)[0][0] if counted else ""


def _stands_still(server: Seen) -> bool:
    """Return True if the replica cannot train, or if an operator has paused it."""
    return server.trainer in CANNOT_TRAIN or (server.trainer == "paused" and not server.held)


def _note(server: Seen, target: str) -> str:
    """Return the reason why a replica does not take part; empty if it does."""
    if server.target != target:
        return f"its target is {server.target}, and most have {target}"
    if not _stands_still(server):
        return ""
    if not server.trainer:
        return "it records nothing; start it with --drafter-training"
    return f"its trainer is {server.trainer} ({server.reason})"
