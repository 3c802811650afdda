"""Limits on the members of lists and objects, checked in their text."""

from __future__ import annotations

from typing import NamedTuple

from tlt_server.errors import InvalidRequest
from tlt_server.frontend.http import counting
from tlt_server.frontend.http.bounds import Limit
from tlt_server.frontend.http.wrong import Wrong, must

# Limits on a value that may be any JSON: its members at all levels, and its levels.
MAX_MEMBERS = 2**17
MAX_DEPTH = 64


class Length(NamedTuple):
    """The limits on the members of a list or an object."""

    least: int
    most: int
    limit: Limit | None  # the setting that `most` comes from

    def check(self, text: memoryview, begins: bytes = b",") -> None:
        """Refuse a text of too few or too many members.

        With the character that begins each member of the right type, the text may also pass if a
        member is of another type: few such characters are quicker to see than where members end.
        """
        empty = counting.is_empty(text)
        if self.least and (empty or (self.least > 1 and counting.members(text).own < self.least)):
            raise must(text, f"have at least {self.least} item{'s' * (self.least > 1)}")
        if empty:
            return
        if len(text) // 2 <= self.most or counting.count(text, begins) < self.most:
            return
        count, limit = counting.members(text).own, self.limit
        if count > self.most and limit is None:
            raise must(text, f"have at most {self.most} item{'s' * (self.most > 1)}")
        if count > self.most and limit is not None:
            raise Wrong(lambda where: limit.exceeded(where, count, self.most))


def check_members(text: memoryview) -> None:
    """Refuse a text that holds too many members, or holds them too deep."""
    levels = counting.count(text, b"[") + counting.count(text, b"{")
    if len(text) <= MAX_MEMBERS and levels <= MAX_DEPTH:
        return  # they are few, which is quicker to see
    counted = counting.members(text)
    if counted.all > MAX_MEMBERS:
        what, limit = f"{counted.all} members in all", MAX_MEMBERS
    elif counted.depth > MAX_DEPTH:
        what, limit = f"{counted.depth} levels", MAX_DEPTH
    else:
        return
    raise Wrong(
        lambda where: InvalidRequest(f"{where} has {what}; the limit is {limit}: send less")
    )
