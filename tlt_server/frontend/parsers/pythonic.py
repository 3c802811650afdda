"""Calls in the form of Llama 3.2 and 4 models, as Python: `[name(key="value"), name()]`. Nothing is
evaluated: arguments are literals, by keyword.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container, Iterator
from typing import Any, ClassVar

from tlt_server.frontend.parsers.json_call import SPACE
from tlt_server.frontend.parsers.pieces import (
    MAX_NAME,
    MAX_SPACE,
    Form,
    Piece,
    SpokenCall,
    SpokenText,
)

MAX_LEVELS = 64
_SPACE = re.compile(r"[ \t\r\n]*")
_NAME = re.compile(r"[^\W\d][\w.-]*")
_KEY = re.compile(r"[^\W\d]\w*")
_NUMBER = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_STRING = re.compile(r""""((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'""", re.DOTALL)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_PLAIN = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", "0": "\0"}
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
MAX_DIGITS = 400
MAX_CALL = 2**16  # characters of one call; a longer one comes back as content
_SIGN = re.compile(r"""["'\\()\[\]{}]""")


class _NoCall(Exception):
    """The text is not a call of this form."""


def read_call(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments as JSON, or None if this is not a call."""
    try:
        return _Reader(text).call()
    except (_NoCall, ValueError, OverflowError, UnicodeError):
        return None


class _Reader:
    def __init__(self, text: str) -> None:
        self._text, self._at, self._levels = text, 0, 0

    def call(self) -> tuple[str, str]:
        name, arguments = self._match(_NAME), dict[str, Any]()
        self._sign("(")
        while not self._is(")"):
            key = self._match(_KEY)
            self._sign("=")
            if key in arguments:
                raise _NoCall
            arguments[key] = self._value()
            self._comma(")")
        self._sign(")")
        if self._at != len(self._text):
            raise _NoCall
        return name, _json(arguments)

    def _value(self) -> Any:
        self._levels += 1
        if self._levels > MAX_LEVELS:
            raise _NoCall
        value = self._read()
        self._levels -= 1
        return value

    def _read(self) -> Any:
        if self._is("["):
            return self._list("[", "]")
        if self._is("("):
            return self._list("(", ")")
        if self._is("{"):
            return self._dict()
        string = _STRING.match(self._text, self._at)
        if string:
            self._at = string.end()
            return _ESCAPE.sub(_unescaped, string[1] if string[1] is not None else string[2])
        number = _NUMBER.match(self._text, self._at)
        if number:
            self._at = number.end()
            return _number(number[0])
        word = self._match(_KEY)
        if word not in _WORDS:
            raise _NoCall
        return _WORDS[word]

    def _list(self, opens: str, closes: str) -> list[Any]:
        values = []
        self._sign(opens)
        while not self._is(closes):
            values.append(self._value())
            self._comma(closes)
        self._sign(closes)
        return values

    def _dict(self) -> dict[str, Any]:
        values = {}
        self._sign("{")
        while not self._is("}"):
            key = self._value()
            self._sign(":")
            if not isinstance(key, str):
                raise _NoCall
            values[key] = self._value()
            self._comma("}")
        self._sign("}")
        return values

    def _space(self) -> None:
        space = _SPACE.match(self._text, self._at)
        assert space is not None
        self._at = space.end()

    def _is(self, sign: str) -> bool:
        self._space()
        return self._text.startswith(sign, self._at)

    def _sign(self, sign: str) -> None:
        if not self._is(sign):
            raise _NoCall
        self._at += 1

    def _comma(self, closes: str) -> None:
        """Read the comma after a member; it is optional after the last one."""
        if self._is(","):
            self._at += 1
        elif not self._is(closes):
            raise _NoCall

    def _match(self, pattern: re.Pattern[str]) -> str:
        self._space()
        found = pattern.match(self._text, self._at)
        if found is None:
            raise _NoCall
        self._at = found.end()
        return found[0]


def _number(text: str) -> int | float:
    if len(text) > MAX_DIGITS:
        raise _NoCall
    if re.fullmatch(r"[-+]?[0-9]+", text):
        return int(text)
    value = float(text)
    if not math.isfinite(value):
        raise _NoCall
    return value


def _unescaped(found: re.Match[str]) -> str:
    escape = found[1]
    if len(escape) > 1:
        return chr(int(escape[1:], 16))
    if escape in "\\'\"":
        return escape
    return _PLAIN.get(escape, found[0])


def _json(value: Any) -> str:
    """Return the JSON. A lone surrogate stays an escape."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


class Pythonic:
    """Finds calls only at the beginning of the text, and only of offered functions: a list there
    may be the answer itself.
    """

    form: ClassVar[Form | None] = None

    def __init__(self, offered: Container[str], most: int) -> None:
        self._offered, self._left = offered, most
        self._held = ""  # from the last call on
        self._scanned = 0  # characters of it
        self._place = "start"
        self._quote = ""
        self._levels = self._begins = 0  # brackets that are open, and where the call begins
        self._escaped = False

    def push(self, text: str) -> Iterator[Piece]:
        if self._place == "text":
            yield SpokenText(text)
            return
        self._held += text
        while self._scanned < len(self._held) and self._place != "text":
            if self._place == "call":
                yield from self._scan()
            else:
                self._separate(self._held[self._scanned])
        if len(self._held) > MAX_CALL:
            self._place = "text"
        if self._place == "text":
            yield from self.end()

    def _separate(self, letter: str) -> None:
        """Read a character between calls."""
        after = {"start": {"[": "first"}, "next": {",": "another", "]": "closed"}}
        if letter in SPACE:
            self._scanned += 1
        elif letter in after.get(self._place, ()):
            self._place = after[self._place][letter]
            self._scanned += 1
            if self._place == "closed":
                self._held, self._scanned = self._held[self._scanned :], 0
        elif self._place in ("first", "another") and self._left:
            self._begins, self._place = self._scanned, "call"
            self._levels, self._quote = 0, ""
        else:
            self._place = "text"

    def _scan(self) -> Iterator[Piece]:
        """Continue to the next sign in a call."""
        found = _SIGN.search(self._held, self._scanned)
        if self._escaped and (found is None or found.start() > self._scanned):
            self._escaped = False
        if found is None:
            self._scanned = len(self._held)
            if not self._levels and self._scanned - self._begins > MAX_NAME + MAX_SPACE:
                self._place = "text"
            return
        sign, self._scanned = found[0], found.end()
        if self._quote:
            self._in_string(sign)
        elif sign == "\\" or not (self._levels or self._opens(sign, found.start())):
            self._place = "text"
        elif sign in "\"'":
            self._quote = sign
        else:
            self._levels += 1 if sign in "([{" else -1
            if not self._levels:
                yield from self._take_call()

    def _in_string(self, sign: str) -> None:
        if self._escaped:
            self._escaped = False
        elif sign == "\\":
            self._escaped = True
        elif sign == self._quote:
            self._quote = ""

    def _opens(self, sign: str, at: int) -> bool:
        """Return True if this first sign opens the arguments of an offered function."""
        return sign == "(" and self._held[self._begins : at].strip(SPACE) in self._offered

    def _take_call(self) -> Iterator[Piece]:
        call = read_call(self._held[self._begins : self._scanned])
        if call is None or call[0] not in self._offered or self._scanned > MAX_CALL:
            self._place = "text"
            return
        self._left -= 1
        self._held, self._scanned, self._place = self._held[self._scanned :], 0, "next"
        yield SpokenCall(*call)

    def end(self) -> Iterator[Piece]:
        held, self._held, self._scanned = self._held, "", 0
        if held:
            yield SpokenText(held)
