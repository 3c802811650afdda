"""An answer as it comes: text in, pieces of reasoning, content and calls out.

White space next to a change from one of these to another belongs to the form in which models write
them, and is left out. All else comes back, and the pieces do not depend on how the text is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tlt_server.frontend.parsers.pieces import MAX_SPACE, Parser, Piece, SpokenText, ThoughtText

SLICE_CHARS = 2**10  # taken in at once, in 2 ms on a slow core


class AnswerReader:
    def __init__(self, thinking: Parser | None, tools: Parser | None) -> None:
        """`thinking` comes first, and `tools` reads what it takes for content."""
        self._thinking, self._tools = thinking, tools
        self._kind: type[Piece] | None = None  # the kind of the last piece
        self._thought = False  # whether there was reasoning, be it white space alone
        self._space = ""

    def push(self, text: str) -> list[Piece]:
        pieces = [SpokenText(text)] if self._thinking is None else self._thinking.push(text)
        return [*self._spaced(self._called(pieces))]

    def end(self) -> list[Piece]:
        """Return what was held, once the answer has ended."""
        pieces = [] if self._thinking is None else [*self._called(self._thinking.end())]
        if self._tools is not None:
            pieces += self._tools.end()
        found = [*self._spaced(pieces)]
        if self._space and self._kind in (None, SpokenText, ThoughtText):
            found.append(self._run(self._space))
        self._space = ""
        return found

    def _run(self, text: str) -> Piece:
        """Return text of the kind that the last piece had."""
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
