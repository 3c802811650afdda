"""Calls in the form of Qwen and Hermes models: each as JSON between `<tool_call>` and
`</tool_call>`.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import ClassVar

from tlt_server.frontend.parsers.json_call import SPACE, JsonCall
from tlt_server.frontend.parsers.pieces import MAX_SPACE, Form, Piece, SpokenText, partial
from tlt_server.grammars.vocabulary import CALL

OPEN, CLOSE = CALL


class Hermes:
    """Finds calls anywhere in the text. The tag marks a call, so any name may be called. A call
    without its last brace or its closing tag counts too.
    """

    form: ClassVar[Form | None] = Form(
        f'{OPEN}\n{{{{"name": {{name}}, "arguments": ', f"}}\n{CLOSE}", "\n"
    )

    def __init__(self, offered: Container[str], most: int) -> None:
        self._left = most
        self._held = ""  # perhaps the beginning of a tag
        self._closing = False  # a call was made, and its closing tag may come
        self._call: JsonCall | None = None

    def push(self, text: str) -> Iterator[Piece]:
        at = 0
        while at < len(text):
            if self._call is not None:
                yield from self._call.push(text, at)
                at = self._call.at
                if self._call.ended or self._call.failed:
                    self._closing, self._call = self._call.made, None
                    self._left -= self._closing
                continue
            text, at, self._held = self._held + text[at:], 0, ""
            if self._closing:
                found = text.lstrip(SPACE)
                few = len(text) - len(found) <= MAX_SPACE
                if few and len(found) < len(CLOSE) and CLOSE.startswith(found):
                    self._held = text
                    return
                self._closing = False
                text = found.removeprefix(CLOSE) if few else text
            start = text.find(OPEN) if self._left else -1
            if start < 0:
                keep = partial(text, OPEN) if self._left else 0
                text, self._held = text[: len(text) - keep], text[len(text) - keep :]
                if text:
                    yield SpokenText(text)
                return
            if start:
                yield SpokenText(text[:start])
            at = start + len(OPEN)
            self._call = JsonCall(OPEN, lambda name: True)

    def end(self) -> Iterator[Piece]:
        if self._call is not None:
            yield from self._call.end()
        elif self._held:
            yield SpokenText(self._held)
        self._held, self._call = "", None
