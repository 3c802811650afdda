"""Parses one call as it arrives: an object with the name of a function and its arguments.

JSON is read as models write it, with raw line breaks and tabs in strings, and with a backslash
before any letter; `JsonText.strict` returns the text as valid JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from tlt_server.frontend.parsers.pieces import Piece, SpokenCall, SpokenText, is_name

MAX_LEVELS = 64
MAX_NUMBER = 400  # characters
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = re.compile(r"[ \t\r\n]+")
_DIGITS = re.compile(r"[-+.eE0-9]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS = {word[0]: word for word in ("true", "false", "null")}
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPED = frozenset('"\\/bfnrt')
MAX_CALL = 2**20  # characters of one call; a longer one comes back as content
ARGUMENTS = ("arguments", "parameters")
SPACE = " \t\r\n"


class JsonText:
    """One value. Call `feed` with its text until `ended` or `failed`."""

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
        """Parse `text[at:end]`. Return the stop position: after the value, at the first wrong
        character, or at the end.
        """
        self._mends = []
        while at < end and not (self.ended or self.failed):
            at = self._step(text, at, end)
        return at

    def strict(self, text: str, at: int, end: int) -> str:
        """Return the text of the last `feed`, `text[at:end]`, as valid JSON."""
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
        """Start a value other than a string. Return False if `letter` does not start one."""
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


class JsonCall:
    """Reads `{"name": ..., "arguments": {...}}`, with fields in any order.

    The call is `made` once its name and its arguments are complete. An incomplete call is content,
    so no client runs a part of a call. After `ended` or `failed`, nothing more is read.
    """

    def __init__(self, before: str, takes: Callable[[str], bool]) -> None:
        """`before`: the text that opened the call. `takes`: whether a name may be called."""
        self.at = 0
        self.made = self.ended = self.failed = False
        self._takes = takes
        self._held = [before]  # text that is not given out
        self._held_size = len(before)
        self._expects = "{"
        self._value = JsonText()  # being read: a key or a field's value
        self._text: list[str] = []
        self._seen: set[str] = set()
        self._key = self._name = self._arguments = ""

    def push(self, text: str, at: int) -> Iterator[Piece]:
        """Parse `text` from `at` on; `self.at` is the stop position."""
        self.at = at
        while self.at < len(text) and not (self.ended or self.failed):
            if self._expects in ("key", "value", "in arguments"):
                yield from self._read_value(text)
            else:
                yield from self._read_sign(text[self.at])
            self.failed |= self._held_size > MAX_CALL
        if self.failed:
            yield from self.end()

    def end(self) -> Iterator[Piece]:
        """Yield the held-back text, as content."""
        held, self._held, self._held_size = "".join(self._held), [], 0
        if held:
            yield SpokenText(held)

    def _read_sign(self, letter: str) -> Iterator[Piece]:
        expects = self._expects
        if letter not in SPACE:
            if letter == "}" and expects in ("first key", "next") and self._name:
                self.ended = True
                if not self.made:
                    yield from self._make("{}")
            elif letter == '"' and expects in ("first key", "another key"):
                self._read("key")
                return  # its text begins with the quote
            elif letter == "{" and expects == "arguments":
                self._read("in arguments")
                return
            elif letter == "," and expects == "next":
                self._expects = "another key"
            elif letter == "{" and expects == "{":
                self._expects = "first key"
            elif letter == ":" and expects == ":":
                if self._key in ARGUMENTS:
                    self._expects = "arguments"
                else:
                    self._read("value")
            else:
                self.failed = True
                return
        self._hold(letter)
        self.at += 1

    def _read(self, what: str) -> None:
        self._expects, self._value, self._text = what, JsonText(), []

    def _hold(self, text: str) -> None:
        self._held.append(text)
        self._held_size += len(text)

    def _make(self, arguments: str) -> Iterator[Piece]:
        self.made, self._held, self._held_size = True, [], 0
        yield SpokenCall(self._name, arguments)

    def _read_value(self, text: str) -> Iterator[Piece]:
        start = self.at
        end = min(len(text), start + MAX_CALL + 1 - self._held_size)
        self.at = self._value.feed(text, start, end)
        self._text.append(self._value.strict(text, start, self.at))
        self._hold(text[start : self.at])
        if self._value.failed:
            self.failed = True
        elif self._value.ended:
            yield from self._take_value()

    def _take_value(self) -> Iterator[Piece]:
        if self._expects == "key":
            self._key = _decoded(self._text)
            field = "arguments" if self._key in ARGUMENTS else self._key
            self.failed = field in self._seen
            self._seen.add(field)
            self._expects = ":"
            return
        if self._expects == "value" and self._key == "name":
            name = _decoded(self._text)
            if not is_name(name) or not self._takes(name):
                self.failed = True
                return
            self._name = name
        elif self._expects == "in arguments":
            self._arguments = "".join(self._text)
        self._expects = "next"
        if self._name and self._arguments and not self.made:
            yield from self._make(self._arguments)


def _decoded(text: list[str]) -> Any:
    """Return the value of a JSON text, or None if the text could not be sent."""
    try:
        return msgspec.json.decode("".join(text))
    except (msgspec.MsgspecError, UnicodeError):
        return ""
