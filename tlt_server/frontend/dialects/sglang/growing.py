"""The output of a choice as a stream in SGLang's form shows it.

A chunk holds the whole output so far, as SGLang's clients expect, or with
`incremental_streaming_output` what no chunk had before. Each token is encoded once. If every
cumulative chunk were sent, the bytes would grow with the square of the output. So a chunk is sent
when it fits into what the chunks of the choice may have together, which grows with its tokens: at
first each token at once, later at points further and further apart. The first chunk and the last
are always sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from tlt_server.frontend.dialects.replies.meta_info import Scored
from tlt_server.frontend.dialects.sglang.requests import GenerateFields
from tlt_server.frontend.generation.choice import Delta
from tlt_server.frontend.generation.text import Incremental, StopStrings, Text
from tlt_server.wire.records import TokenLogprobs

# Bytes of all cumulative chunks of a choice, the last one not counted. An increment of one token
# without log-probs takes about BYTES_PER_TOKEN with its meta_info, so the sum stays of the order of
# increments. A token with 20 alternatives alone takes 350 to 650.
FREE_BYTES = 64 * 1024
BYTES_PER_TOKEN = 256
META_BYTES = 320  # about what a chunk has without its lists and text


Spell = Callable[[int], str | None]  # the text of a token in a triple; None: it has none


class Encoded:
    """The JSON of a list that grows."""

    def __init__(self) -> None:
        self._members = bytearray()

    def __len__(self) -> int:
        return len(self._members)

    def extend(self, members: Iterable[Any]) -> None:
        encoded = msgspec.json.encode(list(members))
        if len(encoded) > len(b"[]"):
            self._members += encoded[1:-1] + b","

    def clear(self) -> None:
        self._members.clear()

    def raw(self) -> msgspec.Raw:
        return msgspec.Raw(b"".join((b"[", memoryview(self._members)[:-1], b"]")))


class OutputLists(NamedTuple):
    """The lists of a choice in a reply, each in a form that `json_slices` encodes: a list, an
    iterator or JSON.
    """

    ids: Any
    scored: Any
    top: Any


class GrowingOutput:
    """The tokens that the next chunk shows. `stops` are the request's stop strings."""

    def __init__(
        self, asked: GenerateFields, text: Text, stops: Sequence[str], spell: Spell
    ) -> None:
        self._asked, self._text_of = asked, spell
        self._ids, self._scored, self._top = Encoded(), Encoded(), Encoded()
        self.tokens = 0  # all that were added
        self.text = ""
        self._shown = 0  # characters in earlier increments
        self._credit = FREE_BYTES
        self._spelled = (
            None
            if asked.sampling_params.skip_special_tokens or text.tokenizer is None
            else Incremental(text, special=True)
        )
        self._stops = StopStrings(stops)

    def add(self, delta: Delta) -> None:
        self.tokens += len(delta.token_ids)
        self._credit += BYTES_PER_TOKEN * len(delta.token_ids)
        self._ids.extend(delta.token_ids)
        if self._asked.return_logprob:
            self._scored.extend(scored(delta.logprobs, delta.token_ids, self._text_of))
            if self._asked.top_logprobs_num and delta.top_logprobs:
                self._top.extend(triples(each, self._text_of) for each in delta.top_logprobs)
        self.text += (delta.text or "") if self._spelled is None else self._spell(delta.token_ids)

    @property
    def due(self) -> bool:
        """Return True if a chunk is to be sent now, before the choice ends."""
        return self._asked.incremental_streaming_output or self._credit >= self._size

    @property
    def lists(self) -> OutputLists:
        return OutputLists(self._ids.raw(), self._scored.raw(), self._top.raw())

    def final_text(self, text: str) -> str:
        """Return what the last chunk shows of the whole text."""
        return text[self._shown :]

    def sent(self) -> None:
        """Note that a chunk has shown what there is."""
        self._credit -= self._size
        if self._asked.incremental_streaming_output:
            self._shown += len(self.text)
            self.text = ""
            for encoded in (self._ids, self._scored, self._top):
                encoded.clear()

    @property
    def _size(self) -> int:
        return META_BYTES + len(self.text) + sum(map(len, (self._ids, self._scored, self._top)))

    def _spell(self, token_ids: list[int]) -> str:
        """Return the text that the tokens add, special tokens included. What may be the beginning
        of a stop string is held back.
        """
        assert self._spelled is not None
        text = "".join(map(self._spelled.push, token_ids))
        return self._stops.push(text, armed=False)


def scored(logprobs: Sequence[float], token_ids: Sequence[int], spell: Spell) -> Iterable[Scored]:
    return ((value, token, spell(token)) for value, token in zip(logprobs, token_ids, strict=True))


def triples(best: TokenLogprobs, spell: Spell) -> list[Scored]:
    return [*scored(best.logprobs, best.token_ids, spell)]
