"""Calls as Llama 3.2 and 4 models write them, in Python: `[name(key="value"), name()]`."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from typing import ClassVar

from tlt_server.frontend.parsers.json_call import SPACE
from tlt_server.frontend.parsers.pieces import (
    MAX_NAME,
    MAX_SPACE,
    Form,
    Piece,
    SpokenCall,
    SpokenText,
)
from tlt_server.frontend.parsers.python_call import read_call

MAX_CALL = 2**16  # characters of one call; a longer one comes back as content
_SIGN = re.compile(r"""["'\\()\[\]{}]""")


class Pythonic:
    """Takes calls at the beginning of the text alone, and only of functions that were offered: a
    list there may be the answer itself.
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
        """Take in a character that stands between calls."""
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
        """Go on to the next sign in a call."""
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
