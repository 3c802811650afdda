"""The calls that belong to one push, and its state from its first manifest to its end.

Trainers send a step in several calls, and few say which step it is or where it begins. Parts of one
session belong together. Other parts form a series: everything that one sender sends, from its first
tensor on, in an order that it keeps. A sender is a version, or without one a group. Invariant: a
push that completes is one series without a gap. A part that brings a tensor with which its sender
began before begins a push. Another part goes on with the push that gathers; every other part is
refused. So however a push ended before it was complete (refused, silent, aborted, replaced), that
need not be remembered: its other parts find no push to go on with, and parts of two steps never
meet. One tensor may come after the part that completed its push: the head that is tied to the
embedding, if both are the same.

This rests on a trainer beginning a push when it has joined its group. A part that was refused is no
beginning, as its group is left (`Transaction.skip`) and has to be joined again, as after a restart
of the engine. A part that never reached the server may have been one: versions and sessions exclude
that.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from tlt_client.channels import owner
from tlt_server.errors import Conflict, TltError
from tlt_server.weights.candidate import Candidate
from tlt_server.weights.parts import Changed
from tlt_server.wire.commands import Manifest


@dataclass(frozen=True)
class Waiting:
    """The push was accepted; `Transaction.start` stages it."""

    name: ClassVar = "waiting"


class InThread:
    """A thread receives, checks and keeps tensors (`staging.py`)."""

    name: ClassVar = "staging"


@dataclass(frozen=True)
class Gathering:
    """The parts that have come are in order, and more are to come."""

    name: ClassVar = "gathering"
    since_s: float


@dataclass(frozen=True)
class Staged:
    """The push is complete and verified."""

    name: ClassVar = "staged"
    changed: Changed
    since_s: float
    due: bool = False  # a commit was asked for


@dataclass(frozen=True)
class Unchanged:
    """The weights are live under their version already."""

    name: ClassVar = "unchanged"
    changed: Changed


@dataclass(frozen=True)
class FailedPush:
    """The push ends with an error."""

    name: ClassVar = "failed"
    error: TltError


@dataclass
class Push:
    """A push on its way. One that comes in parts has one manifest per part."""

    first: Manifest
    manifest: Manifest  # the newest
    candidate: Candidate
    state: Waiting | InThread | Gathering | Staged | Unchanged | FailedPush = Waiting()
    out_of_step: bool = False  # its group also brings a push that nothing takes
    gap: str = ""  # why a tensor of it is missing for good, while the thread works
    phases: dict[str, float] = field(default_factory=dict)  # seconds; also written by the thread
    asked: list[str] = field(default_factory=list)  # ids of the commands that its end answers

    @property
    def version(self) -> str:
        match self.state:
            case Staged(changed) | Unchanged(changed):
                return changed.version
        return self.manifest.version

    @property
    def title(self) -> str:
        """Return the version for messages."""
        return f"version {self.version!r}" if self.version else "a version without a name"

    @property
    def missing(self) -> str:
        """The tensors that a gathering push lacks, for messages."""
        names = self.candidate.missing
        return f"{len(names)} tensors are missing, among them {', '.join(map(repr, names[:3]))}"

    @property
    def to_commit(self) -> bool:
        """Return True if it is committed once it is staged."""
        return self.manifest.commit or (isinstance(self.state, Staged) and self.state.due)

    @property
    def takes_more(self) -> bool:
        """Return True if a further part is taken now."""
        open_ = isinstance(self.state, Gathering) or (
            isinstance(self.state, Staged) and not self.to_commit
        )
        return self.manifest.partial and open_

    @property
    def ending(self) -> bool:
        """Return True if it has failed or was aborted."""
        return isinstance(self.state, FailedPush) or self.candidate.stopped

    @property
    def brings_bytes(self) -> bool:
        """Return True if bytes for it are, or will soon be, taken from its group."""
        return isinstance(self.state, Waiting | InThread)

    @property
    def leaves_bytes(self) -> bool:
        """Return True if bytes stay in its group, after its thread has ended, that the next push
        would take for its own. When one part has failed, others may be on their way.
        """
        failed_part = self.manifest.partial and isinstance(self.state, FailedPush)
        return self.candidate.opened is not self.manifest or failed_part

    def fail(self, error: TltError) -> None:
        consequence = (
            "; it had begun to write over the weights in use (--weight-staging none), so nothing "
            "is generated until a push succeeds"
            if self.candidate.overwritten
            else ""
        )
        self.state = FailedPush(type(error)(error.message + consequence))

    def give_up(self, why: str) -> None:
        """Fail, as it cannot become complete; if its thread works, once that has ended."""
        if isinstance(self.state, InThread):
            self.gap = why
        elif isinstance(self.state, Waiting) or self.takes_more:
            self.fail(self.incomplete(why))

    def incomplete(self, why: str) -> TltError:
        return Conflict(
            f"the push of {self.title} cannot become complete: {why}; push all of its tensors again"
        )

    def abort(self) -> None:
        """Fail now, or at the next phase of its thread, whose wait for a trainer ends."""
        if isinstance(self.state, InThread):
            self.candidate.stop()
        elif isinstance(self.state, Waiting | Gathering | Staged):
            self.fail(self.aborted())

    def aborted(self) -> TltError:
        return Conflict(f"the push of {self.title} was aborted; nothing has changed")

    def goes_on_with(self, manifest: Manifest) -> bool:
        """Return True if the manifest brings more of this push; otherwise it begins another."""
        mine = self.manifest
        same = (mine.session, mine.version, mine.labelled, mine.in_flight, mine.commit) == (
            manifest.session,
            manifest.version,
            manifest.labelled,
            manifest.in_flight,
            manifest.commit,
        )
        return same and not self.candidate.has(manifest)


def first_tensor(part: Manifest) -> tuple[str, str]:
    """Return role and name of the first tensor that a part names."""
    assert part.tensors, "a part names its tensors"
    return owner(part.tensors[0].name, part.role)


REMEMBERED = 1024  # senders
ELSE = (
    "with a version, or within a session (POST /begin_weight_update, /start_weight_update), or "
    "join the group again"
)


class _Sender(NamedTuple):
    version: str
    group: str  # empty if there is a version
    labelled: bool = False  # the version is a label

    def __str__(self) -> str:
        return (
            f"version {self.version!r}"
            if self.version
            else f"group {self.group!r} without a version"
        )


class _Start(NamedTuple):
    tensor: str
    group: str  # the group that brought it


class Series:
    """The first tensor of each sender. The transaction brings every part."""

    def __init__(self) -> None:
        self._starts: OrderedDict[tuple[_Sender, str], _Start] = OrderedDict()  # by sender and role

    def admit(self, part: Manifest, push: Push | None) -> bool:
        """Return True if the part goes on with `push`, which takes more; otherwise it begins one.
        `Conflict` where it may do neither.
        """
        if part.session:
            return push is not None and push.goes_on_with(part)
        sender, (role, tensor) = _sender(part), first_tensor(part)
        other = _sender(push.manifest) if push is not None and not push.manifest.session else None
        start = self._tensor(sender, role)
        if (
            push is not None
            and other == sender
            and tensor != start
            and first_tensor(push.first) != (role, tensor)
            and push.goes_on_with(part)
        ):
            return True
        if start not in (None, tensor):
            raise Conflict(
                f"tensor {tensor!r} goes on with no push: {sender} begins with {start!r}, and the "
                "push that began so has ended, or has that tensor, or other fields; push from "
                f"{start!r} on, in the order of before, or {ELSE}"
            )
        if other is not None and other != sender and not other.version and not sender.version:
            raise Conflict(
                f"a push of {other} is on its way, from which parts that come through another "
                f"group cannot be told; push all through one group, or {ELSE}"
            )
        self.note(part)
        return False

    def note(self, part: Manifest) -> None:
        """Note that the part has come, also if it is refused."""
        if part.session:
            return
        (role, tensor), sender = first_tensor(part), _sender(part)
        self._starts.setdefault((sender, role), _Start(tensor, part.group))
        self._starts.move_to_end((sender, role))
        if len(self._starts) > REMEMBERED:
            self._starts.popitem(last=False)

    def follows(self, part: Manifest, last: Manifest) -> bool:
        """Return True if the sender of `last` sent the part and begins with another tensor."""
        role, tensor = first_tensor(part)
        return self.both(part, last) and self._tensor(_sender(part), role) not in (None, tensor)

    def _tensor(self, sender: _Sender, role: str) -> str | None:
        start = self._starts.get((sender, role))
        return start.tensor if start is not None else None

    def forget(self, group: str) -> None:
        """Forget a group whose trainer is gone; the next one may begin with another tensor, also
        under the same label.
        """
        self._starts = OrderedDict(
            (key, start)
            for key, start in self._starts.items()
            if key[0] != _Sender("", group) and not (key[0].labelled and start.group == group)
        )

    @staticmethod
    def both(one: Manifest, other: Manifest) -> bool:
        """Return True if both are parts of one sender."""
        return (
            one.partial
            and other.partial
            and not one.session
            and not other.session
            and _sender(one) == _sender(other)
        )


def _sender(part: Manifest) -> _Sender:
    labelled = bool(part.version) and part.labelled
    return _Sender(part.version, "" if part.version else part.group, labelled)
