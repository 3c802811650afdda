"""The parts of weights that make one push. Trainers send a step in several calls, and few say which
step it is or where it begins.

Parts of one session belong together. Other parts form a series: everything that one sender sends,
from its first tensor on, in an order that it keeps. A sender is a version, or without one a group.
Invariant: a push that completes is one series without a gap. A part that brings a tensor with which
its sender began before begins a push. Another part goes on with the push that gathers; every other
part is refused. So however a push ended before it was complete (refused, silent, aborted,
replaced), that need not be remembered: its other parts find no push to go on with, and parts of two
steps never meet. One tensor may come after the part that completed its push: the head that is tied
to the embedding, if both are the same.

This rests on a trainer beginning a push when it has joined its group. A part that was refused is no
beginning, as its group is left (`Transaction.skip`) and has to be joined again, as after a restart
of the engine. A part that never reached the server may have been one: versions and sessions exclude
that.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from tlt_server.errors import Conflict
from tlt_server.weights.update import Push, first_tensor
from tlt_server.wire.commands import Manifest

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
    """The first tensor of each sender. The transaction brings every part that is no session's."""

    def __init__(self) -> None:
        self._starts: OrderedDict[tuple[_Sender, str], _Start] = OrderedDict()  # by sender and role

    def admit(self, part: Manifest, push: Push | None) -> bool:
        """Return True if the part goes on with `push`, which takes more; otherwise it begins one.
        `Conflict` where it may do neither.
        """
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
