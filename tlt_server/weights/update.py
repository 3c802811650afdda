"""The calls that belong to one push, and the push's state from its first manifest to its end.

Trainers send a step in several calls, and few calls say which step they belong to or where it
begins. Parts of one session belong together. Other parts form a series: everything that one sender
sends from its first tensor on, in a fixed order. A sender is a version or, without a version, a
group. Invariant: a complete push is one series without a gap. A part that contains its sender's
first tensor begins a push. Any other part continues the gathering push or is rejected. So the
outcome of an earlier push (rejected, silent, aborted, replaced) need not be remembered: its
remaining parts find no push to continue, and parts of two steps never mix. One tensor may arrive
after the part that completed its push: the tied head, if it equals the embedding.

This relies on a trainer to begin a push after it joins its group. A rejected part does not count as
a beginning: its group is left (`Transaction.skip`) and must be joined again, as after a restart of
the engine. A part that never reached the server may have been a beginning; versions and sessions
rule that out.
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
    """The push was accepted and waits for `Transaction.start`."""

    name: ClassVar = "waiting"


class InThread:
    """A thread receives, checks and keeps tensors (`staging.py`)."""

    name: ClassVar = "staging"


@dataclass(frozen=True)
class Gathering:
    """The received parts are in order, and more will follow."""

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
    """The weights are already live under their version."""

    name: ClassVar = "unchanged"
    changed: Changed


@dataclass(frozen=True)
class FailedPush:
    """The push ends with an error."""

    name: ClassVar = "failed"
    error: TltError


@dataclass
class Push:
    """A push in progress. A push in parts has one manifest per part."""

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
        """The missing tensors of a gathering push, for messages."""
        names = self.candidate.missing
        return f"{len(names)} tensors are missing, among them {', '.join(map(repr, names[:3]))}"

    @property
    def to_commit(self) -> bool:
        """Return True if the push is to be committed once it is staged."""
        return self.manifest.commit or (isinstance(self.state, Staged) and self.state.due)

    @property
    def takes_more(self) -> bool:
        """Return True if the push accepts a further part now."""
        open_ = isinstance(self.state, Gathering) or (
            isinstance(self.state, Staged) and not self.to_commit
        )
        return self.manifest.partial and open_

    @property
    def ending(self) -> bool:
        """Return True if the push has failed or was aborted."""
        return isinstance(self.state, FailedPush) or self.candidate.stopped

    @property
    def brings_bytes(self) -> bool:
        """Return True if the push reads, or will soon read, bytes from its group."""
        return isinstance(self.state, Waiting | InThread)

    @property
    def leaves_bytes(self) -> bool:
        """Return True if, after the thread has ended, unread bytes in the group could be mistaken
        for the next push. After one part has failed, others may still arrive.
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
        """Fail because the push cannot become complete; a running thread ends first."""
        if isinstance(self.state, InThread):
            self.gap = why
        elif isinstance(self.state, Waiting) or self.takes_more:
            self.fail(self.incomplete(why))

    def incomplete(self, why: str) -> TltError:
        return Conflict(
            f"the push of {self.title} cannot become complete: {why}; push all of its tensors again"
        )

    def abort(self) -> None:
        """Fail now, or at the thread's next phase; a wait for a trainer is cancelled."""
        if isinstance(self.state, InThread):
            self.candidate.stop()
        elif isinstance(self.state, Waiting | Gathering | Staged):
            self.fail(self.aborted())

    def aborted(self) -> TltError:
        return Conflict(f"the push of {self.title} was aborted; nothing has changed")

    def goes_on_with(self, manifest: Manifest) -> bool:
        """Return True if the manifest continues this push, False if it begins another."""
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
    """Return the role and the name of the first tensor in a part."""
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
    """The first tensor of each sender. The transaction reports every part to it."""

    def __init__(self) -> None:
        self._starts: OrderedDict[tuple[_Sender, str], _Start] = OrderedDict()  # by sender and role

    def admit(self, part: Manifest, push: Push | None) -> bool:
        """Return True if the part continues `push`, which accepts more, and False if it begins a
        push. `Conflict` if it may do neither.
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
                f"tensor {tensor!r} continues no push: {sender} begins with {start!r}, and the "
                "push that began with it has ended, or has this tensor, or other fields; push "
                f"from {start!r} on, in the earlier order, or {ELSE}"
            )
        if other is not None and other != sender and not other.version and not sender.version:
            raise Conflict(
                f"a push of {other} is in progress, and parts that come through another "
                f"group cannot be told; push all through one group, or {ELSE}"
            )
        self.note(part)
        return False

    def note(self, part: Manifest) -> None:
        """Record that the part arrived, even if it is rejected."""
        if part.session:
            return
        (role, tensor), sender = first_tensor(part), _sender(part)
        self._starts.setdefault((sender, role), _Start(tensor, part.group))
        self._starts.move_to_end((sender, role))
        if len(self._starts) > REMEMBERED:
            self._starts.popitem(last=False)

    def follows(self, part: Manifest, last: Manifest) -> bool:
        """Return True if the sender of `last` also sent this part, and it begins with another
        tensor.
        """
        role, tensor = first_tensor(part)
        return self.both(part, last) and self._tensor(_sender(part), role) not in (None, tensor)

    def _tensor(self, sender: _Sender, role: str) -> str | None:
        start = self._starts.get((sender, role))
        return start.tensor if start is not None else None

    def forget(self, group: str) -> None:
        """Forget a group whose trainer has left. The next trainer may begin with another tensor,
        even under the same label.
        """
        self._starts = OrderedDict(
            (key, start)
            for key, start in self._starts.items()
            if key[0] != _Sender("", group) and not (key[0].labelled and start.group == group)
        )

    @staticmethod
    def both(one: Manifest, other: Manifest) -> bool:
        """Return True if both parts have the same sender."""
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
