"""Reasoning between `<think>` and `</think>`."""

from __future__ import annotations

from collections.abc import Iterator

from tlt_server.frontend.parsers.pieces import MAX_SPACE, Piece, SpokenText, ThoughtText, partial
from tlt_server.grammars.vocabulary import THINK

OPEN, CLOSE = THINK
SPACE = " \t\r\n"


class Thinking:
    """Finds reasoning at the beginning of the answer, if the answer or the end of the prompt opens
    it.
    """

    always = False

    def __init__(self, prompt: str) -> None:
        """`prompt`: the end of the prompt's text."""
        self._inside = self.opens(prompt)
        self._starts = True  # the answer may still begin with the tag
        self._held = ""

    @classmethod
    def opens(cls, prompt: str) -> bool:
        """Return True if the answer begins with reasoning after this end of a prompt."""
        return cls.always or prompt.rstrip(SPACE).endswith(OPEN)

    def push(self, text: str) -> Iterator[Piece]:
        text, self._held = self._held + text, ""
        if self._starts:
            found = text.lstrip(SPACE)
            few = len(text) - len(found) <= MAX_SPACE
            if few and len(found) < len(OPEN) and OPEN.startswith(found):
                self._held = text
                return
            self._starts = False
            if few and found.startswith(OPEN):
                self._inside, text = True, found.removeprefix(OPEN)
        if self._inside:
            reasoning, tag, text = text.partition(CLOSE)
            self._inside = not tag
            keep = partial(reasoning, CLOSE) if self._inside else 0
            settled = len(reasoning) - keep
            self._held = reasoning[settled:]
            if settled or tag:
                yield ThoughtText(reasoning[:settled])
        if text:
            yield SpokenText(text)

    def end(self) -> Iterator[Piece]:
        if self._held:
            yield ThoughtText(self._held) if self._inside else SpokenText(self._held)
        self._held = ""


class OpenThinking(Thinking):
    """Reads the answer as reasoning from its first character, for models that never open it."""

    always = True
