"""The message of one choice as its text comes: content, reasoning and calls."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

from msgspec import UNSET

from tlt_server.frontend.dialects.openai.replies import CalledFunction, Speech, ToolCall
from tlt_server.frontend.http.loop_share import Turn
from tlt_server.frontend.http.slices import SLICE_BYTES
from tlt_server.frontend.parsers.answer import SLICE_CHARS, AnswerReader
from tlt_server.frontend.parsers.pieces import Piece, SpokenCall, SpokenText, ThoughtText


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


async def sliced(text: str, turn: Turn) -> AsyncIterator[str]:
    """Yield a text in slices, with turns of other requests between them."""
    for at in range(0, len(text), SLICE_CHARS):
        if at:
            await turn(SLICE_BYTES)
        yield text[at : at + SLICE_CHARS]


class Speaker:
    """Takes text in, and says what came since it last spoke."""

    def __init__(
        self, answer: AnswerReader | None, *, reasons: bool, silence: str | None = None
    ) -> None:
        """`answer` reads the text, None: all of it is content. `reasons`: reasoning is shown.
        `silence` is the content of a whole message that has only calls or reasoning.
        """
        self.calls = 0  # said so far
        self._silence = silence
        self._answer, self._reasons = answer, reasons
        self._pieces: list[Piece] = []

    async def hear(self, text: str, turn: Turn) -> None:
        """Take text in."""
        if self._answer is None:
            self._pieces.append(SpokenText(text))
            return
        async for some in sliced(text, turn):
            self._pieces += self._answer.push(some)

    def end(self) -> None:
        """Take the end of the answer in."""
        if self._answer is not None:
            self._pieces += self._answer.end()

    def delta(self) -> Speech:
        """Return what came, for a chunk of a stream."""
        calls = self._take_calls()
        speech = self._said()
        if calls:
            speech.tool_calls = calls
        elif self._answer is None and speech.content is UNSET:
            speech.content = ""
        return speech

    def message(self) -> Speech:
        """Return the whole message."""
        calls = self._take_calls()
        speech = self._said()
        for call in calls:
            call.index = UNSET
        if calls:
            speech.tool_calls = calls
        if speech.content is UNSET:
            speech.content = self._silence if calls or speech.reasoning else ""
        return speech

    def _take_calls(self) -> list[ToolCall]:
        found = [piece for piece in self._pieces if isinstance(piece, SpokenCall)]
        first, self.calls = self.calls, self.calls + len(found)
        return [
            ToolCall(CalledFunction(call.name, call.arguments), new_call_id(), index=index)
            for index, call in enumerate(found, first)
        ]

    def _said(self) -> Speech:
        """Return the text that came, and forget what did."""
        speech = Speech()
        content = "".join(piece.text for piece in self._pieces if isinstance(piece, SpokenText))
        reasoning = "".join(piece.text for piece in self._pieces if isinstance(piece, ThoughtText))
        if content:
            speech.content = content
        if reasoning and self._reasons:
            speech.reasoning_content = speech.reasoning = reasoning
        self._pieces = []
        return speech
