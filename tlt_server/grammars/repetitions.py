"""Counted repetitions inside others, as in `((a{1,200}){1,200}){1,200}`. A lexer tells their counts
apart, so the work of a mask grows with their product.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tlt_server.errors import InvalidRequest

MOST = 10_000  # product of counts, where one repetition is inside another
_COUNT = re.compile(r"\{(\d{1,9})(,(\d{1,9})?)?\}")
_ESCAPE = re.compile(r"\\(?:[pPxuU]\{[^}]*\}|.)", re.DOTALL)
_GROUP = re.compile(r"\((?:\?(?:P?<[^>]*>|[a-zA-Z-]*:))?")


class _Counts(NamedTuple):
    product: int = 1
    levels: int = 0  # counted repetitions inside each other

    def repeated(self, count: int) -> _Counts:
        return _Counts(self.product * count, self.levels + 1) if count > 1 else self


def check_repetitions(regex: str, where: str = "the regex") -> None:
    """Refuse a regex whose counted repetitions inside each other multiply to more than MOST."""
    found = _largest(regex) if regex.count("{") > 1 else _Counts()
    if found.levels > 1 and found.product > MOST:
        raise InvalidRequest(
            f"{where} has counted repetitions inside each other that multiply to {found.product}; "
            f"the limit is {MOST}: lower the counts, or leave them to * and +"
        )


def _largest(regex: str) -> _Counts:
    """Return the counts around the part of a regex that is repeated most."""
    groups, last, at = [_Counts()], _Counts(), 0
    while at < len(regex):
        sign = regex[at]
        if (count := _COUNT.match(regex, at)) is not None:
            last, at = last.repeated(int(count[3] or count[1])), count.end()
        elif (escape := _ESCAPE.match(regex, at)) is not None:
            last, at = _Counts(), escape.end()
        elif sign == "[":
            last, at = _Counts(), _end_of_class(regex, at)
        elif (group := _GROUP.match(regex, at)) is not None:
            groups.append(_Counts())
            last, at = _Counts(), group.end()
        elif sign == ")" and len(groups) > 1:
            last, at = groups.pop(), at + 1
        elif sign in "*+?":
            at += 1
        else:
            last, at = _Counts(), at + 1
        groups[-1] = max(groups[-1], last)
    return max(groups)


def _end_of_class(regex: str, at: int) -> int:
    """Return where the class of characters that begins there ends."""
    depth, start = 0, at
    while at < len(regex):
        if (escape := _ESCAPE.match(regex, at)) is not None:
            at = escape.end()
            continue
        depth += (regex[at] == "[") - (regex[at] == "]" and at > start + 1)
        at += 1
        if not depth:
            return at
    return len(regex)
