"""JSON as it comes: whether a text still is the beginning of a value, and where the value ends.

Strings are read as models write them, with raw line breaks and tabs, and with a backslash before
any letter. `strict` gives the text as JSON.
"""

from __future__ import annotations

import json
import re

MAX_LEVELS = 64
MAX_NUMBER = 400  # characters
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = re.compile(r"[ \t\r\n]+")
_DIGITS = re.compile(r"[-+.eE0-9]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS = {word[0]: word for word in ("true", "false", "null")}
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPED = frozenset('"\\/bfnrt')


class JsonText:
    """One value. `feed` takes its text in until `ended` or `failed`."""

    def __init__(self) -> None:
        self.ended = self.failed = False
        self._closes: list[str] = []  # closing brackets of the open containers
        self._expects = "value"
        self._rest = ""  # what a word still needs, or what a number has so far
        self._hex = 0  # digits of an escape that are still to come
        self._mends: list[
            tuple[int, str]
        ] = []  # in the newest text: a letter's place, and its JSON

    def feed(self, text: str, at: int, end: int) -> int:
        """Take in `text[at:end]`. Return where this stopped: after the value, at the first
        character that is wrong, or at the end.
        """
        self._mends = []
        while at < end and not (self.ended or self.failed):
            at = self._step(text, at, end)
        return at

    def strict(self, text: str, at: int, end: int) -> str:
        """Return as JSON what the last `feed` has taken in, `text[at:end]`."""
        parts = list[str]()
        for place, letter in self._mends:
            parts += [text[at:place], letter]
            at = place + 1
        return "".join([*parts, text[at:end]])

    def _step(self, text: str, at: int, end: int) -> int:
        match self._expects:
            case "string" | "name":
                return self._string(text, at, end)
            case "escape" | "name escape":
                return self._escape(text[at], at)
            case "number":
                return self._number(text, at, end)
            case "word":
                return self._word(text[at], at)
        space = _SPACE.match(text, at, end)
        if space:
            return space.end()
        return self._structure(text[at], at)

    def _structure(self, letter: str, at: int) -> int:
        expects, closes = self._expects, self._closes
        if letter == '"' and expects in ("value", "first value", "first name", "another name"):
            self._expects = "name" if expects.endswith("name") else "string"
        elif expects in ("value", "first value") and self._begins(letter):
            pass
        elif letter == ":" and expects == "colon":
            self._expects = "value"
        elif letter == "," and expects == "next":
            self._expects = "another name" if closes[-1] == "}" else "value"
        elif closes and letter == closes[-1] and expects in ("next", "first value", "first name"):
            closes.pop()
            self._end_value()
        else:
            self.failed = True
            return at
        return at if self._expects == "number" else at + 1

    def _begins(self, letter: str) -> bool:
        """Begin a value that is no string. Return whether `letter` does."""
        if letter in "{[":
            self._closes.append("}" if letter == "{" else "]")
            self._expects = "first name" if letter == "{" else "first value"
            return len(self._closes) <= MAX_LEVELS
        if letter in _WORDS:
            self._expects, self._rest = "word", _WORDS[letter][1:]
            return True
        if letter in "-0123456789":
            self._expects, self._rest = "number", ""
            return True
        return False

    def _end_value(self) -> None:
        self._expects = "next"
        self.ended = not self._closes

    def _string(self, text: str, at: int, end: int) -> int:
        plain = _PLAIN.match(text, at, end)
        if plain:
            return plain.end()
        if text[at] == "\\":
            self._expects = "escape" if self._expects == "string" else "name escape"
        elif text[at] != '"':
            self._mends.append((at, _escaped(text[at])))  # a control character
        elif self._expects == "name":
            self._expects = "colon"
        else:
            self._end_value()
        return at + 1

    def _escape(self, letter: str, at: int) -> int:
        if self._hex and letter in _HEX:
            self._hex -= 1
        elif not self._hex and letter == "u":
            self._hex = 4
        elif self._hex:
            self.failed = True
            return at
        elif letter not in _ESCAPED:
            self._mends.append((at, "\\" + _escaped(letter)))
        if not self._hex:
            self._expects = "string" if self._expects == "escape" else "name"
        return at + 1

    def _number(self, text: str, at: int, end: int) -> int:
        digits = _DIGITS.match(text, at, min(end, at + MAX_NUMBER + 1 - len(self._rest)))
        if digits:
            self._rest += digits[0]
            self.failed = len(self._rest) > MAX_NUMBER
            return digits.end()
        if _NUMBER.fullmatch(self._rest):
            self._end_value()
        else:
            self.failed = True
        return at

    def _word(self, letter: str, at: int) -> int:
        if letter != self._rest[0]:
            self.failed = True
            return at
        self._rest = self._rest[1:]
        if not self._rest:
            self._end_value()
        return at + 1


def _escaped(letter: str) -> str:
    return json.dumps(letter, ensure_ascii=False)[1:-1]
