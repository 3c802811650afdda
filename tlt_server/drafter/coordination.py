"""The decisions of `tlt drafter coordinate`, from the states of servers to actions. No I/O and no
clock, so a test can simulate the servers.

At most one server trains. It is idle, and at least `min_idle` others stay idle. It stops training
once it is busy or too few others are idle. The others' training is paused; pauses expire by
themselves, so each decision renews them. When the training server adopts a drafter, every server
gets that drafter under the same version. Servers whose target differs from the most common one are
left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_REFUSALS = 3  # pushes of one version to one server
CANNOT_TRAIN = ("", "failed")
AT_WORK = ("training", "evaluating")


class Seen(NamedTuple):
    """One server that answered."""

    url: str
    load: int  # open sequences
    trainer: str  # its state; empty: it records nothing
    rounds: int  # rounds of training that have ended and had something to train on
    target: str  # weight versions
    drafter: str
    trained: bool = False  # whether a trainer made this drafter for this target
    held: bool = False  # whether its trainer is in a pause that ends by itself
    reason: str = ""  # for the trainer's state


class LetTrain(NamedTuple):
    """Allow this server to train on the sequences of all."""

    url: str
    again: bool = False  # it was let, but has begun nothing yet


class StopTraining(NamedTuple):
    """Forbid this server to train, for a while."""

    url: str
    reason: str
    again: bool = False  # it is held already


class GiveSamples(NamedTuple):
    """Send this server the sequences of the others."""

    url: str


class ShareDrafter(NamedTuple):
    """Push the drafter `version` of `source` to this server."""

    url: str
    source: str
    version: str


Action = LetTrain | StopTraining | GiveSamples | ShareDrafter


class SharedDrafter(NamedTuple):
    source: str
    target: str
    version: str


@dataclass
class Coordination:
    min_idle: int = 0
    quiet_s: float = 5.0  # for which a server must be idle before it trains
    training: str = ""  # the server that trains; empty: none
    last: str = ""  # the one that trained last
    shared: SharedDrafter | None = None  # the drafter that all are given
    rounds: int = 0  # rounds ended at the training server since it began
    notes: dict[str, str] = field(default_factory=dict)  # server -> why it takes no part
    # Servers that something else has let train, or held, against what was asked here.
    rivals: set[str] = field(default_factory=set)
    _held: set[str] = field(default_factory=set)  # servers that have paused, as they were asked
    _before: Seen | None = None  # the training server as it began, or adopted
    _idle_from: dict[str, float] = field(default_factory=dict)
    _unable: set[str] = field(default_factory=set)
    _refusals: Counter[tuple[str, str]] = field(default_factory=Counter)

    def decide(
        self, seen: Sequence[Seen], now_s: float, asked: Collection[str] = ()
    ) -> list[Action]:
        """Return the actions for the servers that answered, in order. `asked`: the servers that
        have not yet carried out an earlier action.
        """
        target = _common_target(seen)
        self.notes = {server.url: note for server in seen if (note := _note(server, target))}
        seen = [server for server in seen if server.target == target]
        by_url = {server.url: server for server in seen}
        idle = {server.url for server in seen if not server.load}
        self._idle_from = {url: self._idle_from.get(url, now_s) for url in by_url if url in idle}
        at_work = {s.url for s in seen if s.trainer in AT_WORK and not s.held}
        self._held = self._held & by_url.keys() - {*asked}  # the other pauses may have ended
        self.rivals = at_work & self._held
        self._unable &= by_url.keys()  # one that was away may have been mended
        if self.shared and seen and self.shared.target != target:
            self.shared = None  # it was made for weights that are gone
        actions: list[Action] = []
        if self.training:
            server = by_url.get(self.training)
            if server is not None and server.url in asked:
                server = server._replace(held=False)  # its pause is being ended
            actions += self._look_after(server, len(idle - {self.training}))
        chosen = None if self.training else self._chosen(seen, idle, now_s)
        if chosen is not None:
            self.training = self.last = chosen.url
            self._held.discard(chosen.url)
            self._before, self.rounds = chosen, 0
            actions.append(LetTrain(chosen.url))
        for server in seen:
            if server.url == self.training:
                idles = server is not chosen and server.trainer == "idle" and not self.rounds
                again = LetTrain(server.url, again=True)
                given = again if idles else GiveSamples(server.url)
                actions += [] if server is chosen else [given]
            elif server.trainer != "adopting" and not _stands_still(server):
                pause = StopTraining(server.url, "one server trains at a time", server.held)
                actions += [] if any(_same(pause, action) for action in actions) else [pause]
        return actions + self._shares(seen)

    def stopped(self, url: str) -> None:
        """Record that a server has paused on request."""
        self._held.add(url)

    def refused(self, share: ShareDrafter) -> None:
        """Count a push that a server rejected."""
        self._refusals[share.url, share.version] += 1

    def cannot_train(self, url: str) -> None:
        """Exclude a server that has refused to train."""
        self.put_off(url)
        self._unable.add(url)

    def put_off(self, url: str) -> None:
        """Prefer other servers to this one, which did not start to train."""
        self.training = self.last = ""
        self._idle_from.pop(url, None)

    def gives_up(self, share: ShareDrafter) -> bool:
        return self._refusals[share.url, share.version] >= MAX_REFUSALS

    def done(self, seen: Sequence[Seen]) -> bool:
        """Return True if a round of training has ended and every server has its drafter, if there
        is one.
        """
        return bool(self.last) and (not self.training or self.rounds > 0) and not self._shares(seen)

    def _look_after(self, server: Seen | None, idle_others: int) -> list[Action]:
        """Record the training server's adopted drafter, and decide whether training continues."""
        assert self._before is not None
        if server is None or _stands_still(server) or server.held:
            if server is not None and server.held:
                self.rivals.add(server.url)
            self.training = ""
            return []
        if server.target != self._before.target:
            self._before = server  # a push to it; the drafter may have come with it
        elif server.trained and server.drafter != self._before.drafter:
            self.shared = SharedDrafter(server.url, server.target, server.drafter)
            self._before = self._before._replace(drafter=server.drafter)
        self.rounds = max(0, server.rounds - self._before.rounds)
        if server.trainer == "adopting":
            return []
        reason = ""
        if server.load:
            reason = f"{server.load} sequences are open"
        elif idle_others < self.min_idle:
            reason = f"{idle_others} others are idle, and --min-idle is {self.min_idle}"
        if not reason:
            return []
        self.training = ""
        return [StopTraining(server.url, reason)]

    def _chosen(self, seen: Sequence[Seen], idle: set[str], now_s: float) -> Seen | None:
        """Return the server to train: the last one if it is eligible, else the one idle for
        longest.
        """
        if len(idle) <= self.min_idle:
            return None
        lacking = {share.url for share in self._shares(seen)}
        able = [
            server
            for server in seen
            if server.url in idle - lacking - self._unable
            and not _stands_still(server)
            and now_s - self._idle_from[server.url] >= self.quiet_s
        ]
        return min(
            able,
            key=lambda server: (server.url != self.last, self._idle_from[server.url]),
            default=None,
        )

    def _shares(self, seen: Sequence[Seen]) -> list[Action]:
        if self.shared is None:
            return []
        having = [server.url for server in seen if server.drafter == self.shared.version]
        source = self.shared.source
        if having and source not in having:
            source = having[0]
        shares = [
            ShareDrafter(server.url, source, self.shared.version)
            for server in seen
            if server.target == self.shared.target and server.drafter != self.shared.version
        ]
        return [share for share in shares if not self.gives_up(share)]


def _common_target(seen: Sequence[Seen]) -> str:
    """Return the most common target version; the first one of a tie."""
    counted = Counter(server.target for server in seen)
    return counted.most_common(1)[0][0] if counted else ""


def _stands_still(server: Seen) -> bool:
    """Return True if the server cannot train, or if another client has paused it."""
    return server.trainer in CANNOT_TRAIN or (server.trainer == "paused" and not server.held)


def _note(server: Seen, target: str) -> str:
    """Return the reason why a server does not take part; empty if it does."""
    if server.target != target:
        return f"is left out: its target is {server.target}, and most have {target}"
    if not _stands_still(server):
        return ""
    if not server.trainer:
        return "does not train: it records nothing; restart it with --drafter-training idle"
    return f"does not train: its trainer is {server.trainer} ({server.reason})"


def _same(pause: StopTraining, action: Action) -> bool:
    return isinstance(action, StopTraining) and action.url == pause.url
