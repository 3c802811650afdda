"""An answer in progress: text in, pieces of reasoning, content and calls out, by the parsers that
the settings name or that suit the model's chat template.

White space at a change from one kind to another belongs to the form in which models write them, and
is left out. All other text is returned, and the pieces do not depend on how the text is cut.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple

from tlt_server.frontend.parsers import REASONING_PARSERS, TOOL_PARSERS
from tlt_server.frontend.parsers.llama3_json import Llama3Json
from tlt_server.frontend.parsers.pieces import (
    MAX_SPACE,
    Parser,
    Piece,
    SpokenText,
    ThoughtText,
    ToolParser,
)
from tlt_server.frontend.parsers.thinking import Thinking

SLICE_CHARS = 2**10  # taken in at once, in 2 ms on a slow core
MAX_CALLS = 128  # read out of one answer
PROMPT_END = 64  # characters of the prompt that say whether it opens the reasoning
# What a template holds that asks for calls in some form, and what it holds if it means another one.
_SIGNS = (
    ("hermes", "<tool_call>", ("<function=", "<arg_key>")),
    ("pythonic", "[func_name1(", ()),
    ("llama3_json", '"parameters": dictionary', ()),
    ("llama3_json", "<|python_tag|>", ()),
)


class AnswerReader:
    def __init__(self, thinking: Parser | None, tools: Parser | None) -> None:
        """`thinking` reads first; `tools` reads the content that it returns."""
        self._thinking, self._tools = thinking, tools
        self._kind: type[Piece] | None = None  # the kind of the last piece
        self._thought = False  # whether there was reasoning, be it white space alone
        self._space = ""

    def push(self, text: str) -> list[Piece]:
        pieces = [SpokenText(text)] if self._thinking is None else self._thinking.push(text)
        return [*self._spaced(self._called(pieces))]

    def end(self) -> list[Piece]:
        """Return the held-back pieces at the end of the answer."""
        pieces = [] if self._thinking is None else [*self._called(self._thinking.end())]
        if self._tools is not None:
            pieces += self._tools.end()
        found = [*self._spaced(pieces)]
        if self._space and self._kind in (None, SpokenText, ThoughtText):
            found.append(self._run(self._space))
        self._space = ""
        return found

    def _run(self, text: str) -> Piece:
        """Return text of the same kind as the last piece."""
        return ThoughtText(text) if self._kind is ThoughtText else SpokenText(text)

    def _called(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if isinstance(piece, SpokenText) and self._tools is not None:
                yield from self._tools.push(piece.text)
            else:
                yield piece

    def _spaced(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Yield the pieces without the white space between two kinds."""
        for piece in pieces:
            if not isinstance(piece, SpokenText | ThoughtText):
                self._kind, self._space = type(piece), ""
                yield piece
                continue
            text, kind = piece.text, type(piece)
            self._thought |= kind is ThoughtText
            first = self._kind is None and not self._thought
            if kind is self._kind or first:
                text = self._space + text
            else:
                text = text.lstrip()
                self._space = "" if text else self._space
            if not text:
                continue
            settled = max(len(text.rstrip()), len(text) - MAX_SPACE)
            body, self._space = text[:settled], text[settled:]
            if body:
                self._kind = kind
                yield self._run(body)


class Parsers(NamedTuple):
    name: str  # the form of calls; empty: they stay text, unless they are forced
    tools: type[ToolParser] | None
    forced: type[ToolParser]  # for answers that must call, whose form is known
    thinking: type[Thinking] | None

    def answer(
        self,
        prompt_end: str,
        offered: Container[str] | None,
        *,
        forced: bool,
        parallel: bool,
        reasons: bool,
    ) -> AnswerReader | None:
        """Return the reader of an answer, or None if all of its text is content.

        `offered`: names of the functions; None: read no calls. `forced`: the answer must be calls.
        `parallel`: several calls are allowed. `reasons`: separate reasoning.
        """
        thinking = self.thinking(prompt_end) if self.thinking and reasons else None
        kind = self.forced if forced else self.tools
        tools = None
        if kind is not None and offered is not None:
            tools = kind(offered, MAX_CALLS if parallel else 1)
        return AnswerReader(thinking, tools) if thinking or tools else None


def parsers_of(tool_parser: str | None, reasoning_parser: str, template: str | None) -> Parsers:
    """Return the parsers of these names. `StartupError` for an unknown name. Calls: None chooses
    the template's form, and `none` leaves them as text.
    """
    name = _suited(template or "") if tool_parser is None else tool_parser
    name = "" if name == "none" else name
    tools = TOOL_PARSERS.resolve(name) if name else None
    return Parsers(
        name,
        tools,
        tools if tools is not None and tools.form is not None else Llama3Json,
        REASONING_PARSERS.resolve(reasoning_parser) if reasoning_parser != "none" else None,
    )


def _suited(template: str) -> str:
    return next(
        (
            name
            for name, sign, others in _SIGNS
            if sign in template and not any(other in template for other in others)
        ),
        "",
    )
