"""One call as it comes: an object with the name of a function and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from tlt_server.frontend.parsers.json_text import JsonText
from tlt_server.frontend.parsers.pieces import Piece, SpokenCall, SpokenText, is_name

MAX_CALL = 2**20  # characters of one call; a longer one comes back as content
ARGUMENTS = ("arguments", "parameters")
SPACE = " \t\r\n"


class JsonCall:
    """Reads `{"name": ..., "arguments": {...}}`, whose fields may come in any order.

    The call is `made` once its name and its arguments are whole. What breaks off before is content,
    so no client runs a part of a call. `ended` or `failed`: nothing more is taken in.
    """

    def __init__(self, before: str, takes: Callable[[str], bool]) -> None:
        """`before` is the text that opened the call, `takes` tells which names may be called."""
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
        """Take in `text` from `at` on; `self.at` then is where this stopped."""
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
        """Yield what is held, as content."""
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
    """Return what a JSON text says, or nothing if it is no text that could be sent."""
    try:
        return msgspec.json.decode("".join(text))
    except (msgspec.MsgspecError, UnicodeError):
        return ""
