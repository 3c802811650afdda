"""A call written in Python, `name(key="value", other=[1, None])`, as a name and JSON. Nothing is
evaluated: arguments are literals, by keyword.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

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


class _NoCall(Exception):
    """The text is no call of this kind."""


def read_call(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments as JSON, or None if this is no call."""
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
        """Take in the comma after a member, which the last one may have or not."""
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
    """Return the JSON. A part of a character that stands alone stays an escape."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text
