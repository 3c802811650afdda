"""Calls in the form of Llama 3 models: the answer is one call as JSON, or several with `;` in
between.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import ClassVar

from tlt_server.frontend.parsers.json_call import SPACE, JsonCall
from tlt_server.frontend.parsers.pieces import MAX_SPACE, Form, Piece, SpokenText

MARK = "<|python_tag|>"  # may come first; where it is a special token, it is not in the text


class Llama3Json:
    """Finds calls only at the beginning of the text, and only of offered functions: an object there
    may be the answer itself.
    """

    form: ClassVar[Form | None] = Form('{{"name": {name}, "parameters": ', "}", "; ")

    def __init__(self, offered: Container[str], most: int) -> None:
        self._offered, self._left = offered, most
        self._held = ""
        self._separators = ""  # signs that may come before the next call
        self._is_text = False
        self._call: JsonCall | None = None

    def push(self, text: str) -> Iterator[Piece]:
        at = 0
        while at < len(text):
            if self._call is not None:
                yield from self._call.push(text, at)
                at = self._call.at
                if self._call.ended or self._call.failed:
                    self._is_text, self._separators = self._call.failed, ";,"
                    self._call = None
            elif self._is_text:
                yield SpokenText(text[at:])
                return
            else:
                text, self._held = self._held + text[at:], ""
                before = self._before_call(text)
                if before is None:
                    self._is_text, at = True, 0
                elif len(before) < len(text) and text[len(before)] == "{":
                    self._left, at = self._left - 1, len(before)
                    self._call = JsonCall(before, self._offered.__contains__)
                else:
                    self._held = text
                    return

    def _before_call(self, text: str) -> str | None:
        """Return the text allowed before a call, or None if no call follows."""
        found = text.lstrip(SPACE + self._separators)
        if not self._separators:
            if 0 < len(found) < len(MARK) and MARK.startswith(found):
                return text
            found = found.removeprefix(MARK).lstrip(SPACE)
        before = text[: len(text) - len(found)]
        fits = len(before) <= len(MARK) + MAX_SPACE and found[:1] in ("{", "") and self._left
        return before if fits else None

    def end(self) -> Iterator[Piece]:
        if self._call is not None:
            yield from self._call.end()
        elif self._held:
            yield SpokenText(self._held)
        self._held, self._call = "", None
