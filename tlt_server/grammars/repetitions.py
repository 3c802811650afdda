"""Nested counted repetitions, such as `((a{1,200}){1,200}){1,200}`: the work of a mask grows with
the product of the counts that a text leaves open.

One stack reads regexes, and rules and terminals in Lark's form. In a regex all nested counts
multiply. In Lark's form, counts multiply through names too, unless each character determines
whether a repetition continues or its part begins again, as in `(NAME ","){1,1000}`. A recursive
rule counts once. Brackets and quotes separate the values of a JSON schema, so only the counts of
one pattern multiply.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from tlt_server.errors import InvalidRequest

MOST = 10_000  # product of counts, where one repetition is inside another
HIGHEST = 10**12  # to which products are counted
# Sets of characters: a bit for each one of ASCII, one for all others, one for tokens by their id.
OTHER, TOKEN = 1 << 128, 1 << 129
ALL = (TOKEN << 1) - 1
_COUNT = re.compile(r"\{\s*([0-9]+)\s*(,\s*([0-9]+)?\s*)?\}")
_ESCAPE = re.compile(r"\\(?:[pPxuU]\{[^}]{0,99}\}|.)", re.DOTALL)
_GROUP = re.compile(r"\((?:\?(?:P?<[^>]{0,999}>|[a-zA-Z-]*[:)]))?")
_FLAG = {flag: re.compile(rf"\(\?[a-zA-Z]*{flag}") for flag in "ix"}
_SKIPPED = re.compile(r"(\\.)|\s+|#[^\n]*", re.DOTALL)  # where a regex is verbose
_PLAIN_CLASS = re.compile(r"\[(\^?)((?:\\[^pPxuUDWS]|[^\[\]\\&~])+)\]")
_CLASS_PART = re.compile(r"(\\.|.)(?:-(\\.|[^-]))?", re.DOTALL)


def chars(text: str) -> int:
    """Return a text's characters as a bit set."""
    found = 0
    for sign in text:
        found |= 1 << ord(sign) if ord(sign) < 128 else OTHER
    return found


_SETS = {
    "d": chars("0123456789") | OTHER,
    "s": chars(" \t\n\r\f\v") | OTHER,
    "w": chars("_0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ") | OTHER,
} | {letter: chars(sign) for letter, sign in zip("nrtfva", "\n\r\t\f\v\a", strict=True)}


class CountedPart(NamedTuple):
    """Properties of a grammar's part that decide how outer counts multiply."""

    product: int = 1  # its counts multiplied
    nested: int = 1  # the same, only for counts inside each other
    nullable: bool = True  # it may be empty
    first: int = 0  # characters with which it may begin
    tail: int = 0  # characters with which a repetition at its end may go on

    def then(self, other: CountedPart) -> CountedPart:
        return CountedPart(
            max(self.product, other.product),
            max(self.nested, other.nested),
            self.nullable and other.nullable,
            self.first | (other.first if self.nullable else 0),
            other.tail | (self.tail if other.nullable else 0),
        )

    def either(self, other: CountedPart) -> CountedPart:
        return CountedPart(
            max(self.product, other.product),
            max(self.nested, other.nested),
            self.nullable or other.nullable,
            self.first | other.first,
            self.tail | other.tail,
        )

    def repeated(self, least: int, most: int | None, *, strict: bool) -> CountedPart:
        """Return the part repeated. `most`: None for any number. `strict`: all counts multiply."""
        count = max(1, least if most is None else most)
        told_apart = not (strict or self.nullable or self.first & self.tail)
        product, nested = min(self.product * count, HIGHEST), self.nested
        if told_apart:
            product = max(self.product, count)
        elif self.product > 1 and count > 1:
            nested = max(nested, product)
        again = self.first if most is None or most > 1 else 0
        return CountedPart(
            product, nested, self.nullable or not least, self.first, self.tail | again
        )


EMPTY = CountedPart()


class _Frame:
    """A group that is being parsed."""

    def __init__(self) -> None:
        self.before: CountedPart | None = None  # alternatives
        self.sequence = self.last = EMPTY

    def add(self, part: CountedPart) -> None:
        self.sequence, self.last = self.sequence.then(self.last), part

    def bar(self) -> None:
        self.before, self.sequence, self.last = self.whole(), EMPTY, EMPTY

    def whole(self) -> CountedPart:
        found = self.sequence.then(self.last)
        return found if self.before is None else self.before.either(found)


class Stack:
    """Nested groups. `strict`: all counts multiply."""

    def __init__(self, *, strict: bool) -> None:
        self._strict, self._frames = strict, [_Frame()]

    @property
    def top(self) -> _Frame:
        return self._frames[-1]

    def open(self) -> None:
        self._frames.append(_Frame())

    def close(self) -> None:
        if len(self._frames) > 1:
            found = self._frames.pop().whole()
            self.top.add(found)

    def repeat(self, least: int, most: int | None) -> None:
        self.top.last = self.top.last.repeated(least, most, strict=self._strict)

    def sign(self, sign: str) -> None:
        """Repeat the last part by a sign: `*`, `+` or `?`."""
        self.repeat(int(sign == "+"), 1 if sign == "?" else None)

    def whole(self) -> CountedPart:
        while len(self._frames) > 1:
            self.close()
        return self.top.whole()


def number(digits: str) -> int:
    """Return a count of any length; a very long one counts as a large number."""
    digits = digits.lstrip("+-0")
    return int(digits or "0") if len(digits) < 10 else 10**9


def check_repetitions(regex: str, where: str = "the regex", flags: str = "") -> CountedPart:
    """Refuse a regex whose nested counted repetitions multiply to more than MOST."""
    found = _regex_part(regex, any_case=_has("i", regex, flags))
    check(found, where)
    if _has("x", regex, flags):  # somewhere in it
        found = _regex_part(_SKIPPED.sub(r"\1", regex), any_case=True).either(found)
        check(found, where)
    return found


def _has(flag: str, regex: str, flags: str) -> bool:
    return flag in flags or _FLAG[flag].search(regex) is not None


def check(part: CountedPart, where: str) -> None:
    if part.nested > MOST:
        raise InvalidRequest(
            f"{where} has counted repetitions inside each other that multiply to {part.nested}; "
            f"the limit is {MOST}: lower the counts, or leave them to * and +"
        )


def _regex_part(regex: str, *, any_case: bool) -> CountedPart:
    """Return the counts of a regex. `any_case`: a letter may be any character."""
    stack, at = Stack(strict=True), 0
    while at < len(regex):
        if (found := _COUNT.match(regex, at)) is not None:
            least = number(found[1])
            most = least if not found[2] else number(found[3]) if found[3] else None
            stack.repeat(least, most)
        elif (found := _ESCAPE.match(regex, at)) is not None:
            stack.top.add(_escaped(found[0], any_case=any_case))
        elif (found := _GROUP.match(regex, at)) is not None:
            if not found[0].endswith(")"):  # it sets no flags
                stack.open()
        elif regex[at] == "[":
            end = _end_of_class(regex, at)
            stack.top.add(_set_part(_class(regex[at:end]), any_case=any_case))
            at = end
            continue
        else:
            _read_sign(stack, regex[at], any_case=any_case)
        at = found.end() if found is not None else at + 1
    return stack.whole()


def _read_sign(stack: Stack, sign: str, *, any_case: bool) -> None:
    if sign == ")":
        stack.close()
    elif sign == "|":
        stack.top.bar()
    elif sign in "*+?":
        stack.sign(sign)
    elif sign in "^$":
        stack.top.add(EMPTY)
    else:
        stack.top.add(_set_part(ALL if sign == "." else chars(sign), any_case=any_case))


def _set_part(found: int, *, any_case: bool = False) -> CountedPart:
    return CountedPart(nullable=False, first=ALL if any_case else found)


def _escaped(escape: str, *, any_case: bool) -> CountedPart:
    letter = escape[1]
    if letter in "bBAzZ":
        return EMPTY
    unknown = letter in "pPxuUDWS0123456789"
    return _set_part(ALL if unknown else _SETS.get(letter, chars(letter)), any_case=any_case)


def _class(text: str) -> int:
    """Return the characters of a class; all, if it is more than a list of ranges."""
    plain = _PLAIN_CLASS.fullmatch(text)
    if plain is None:
        return ALL
    found = 0
    for low, high in _class_parts(plain[2]):
        if high and (low + high).replace("\\", "").isalnum() and "\\" in low + high:
            return ALL
        if high:
            found |= span(low[-1], high[-1])
        else:
            found |= _SETS.get(low[1], chars(low[1])) if len(low) > 1 else chars(low)
    return ALL & ~TOKEN & ~found | (OTHER if found & OTHER else 0) if plain[1] else found


def _class_parts(text: str) -> Iterator[tuple[str, str]]:
    for part in _CLASS_PART.finditer(text):
        yield part[1], part[2] or ""


def span(low: str, high: str) -> int:
    """Return the characters of a range, as a bit set."""
    first, last = ord(low), ord(high)
    found = OTHER if last > 127 else 0
    return found | sum(1 << at for at in range(first, min(last, 127) + 1))


def _end_of_class(regex: str, at: int) -> int:
    """Return the end of the character class that begins at this position."""
    depth, first = (
        0,
        at + 1 + regex.startswith("[^", at),
    )  # a bracket there is one of the characters
    while at < len(regex):
        if (found := _ESCAPE.match(regex, at)) is not None:
            at = found.end()
            continue
        depth += (regex[at] == "[") - (regex[at] == "]" and at > first)
        at += 1
        if not depth:
            return at
    return len(regex)
