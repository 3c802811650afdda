"""Generation in SGLang's form: one reply or a list, log-probs as triples, and streams whose chunks
have the whole output so far, or increments.

`POST /generate` calls this for bodies with `text` or `input_ids`. Errors have the native shape,
which contains SGLang's.

Each token of a stream is encoded once. Sending every chunk of the whole output so far would take
bytes in proportion to the square of the output. So a chunk is sent only if it fits in the budget of
the choice's chunks, which grows with its tokens: at first each token at once, later at growing
intervals. The first and the last chunk are always sent.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from tlt_server.frontend.dialects.replies.logprobs import (
    MetaInfo,
    Scored,
    Triple,
    ended,
    made,
    scored_prompt,
)
from tlt_server.frontend.dialects.replies.whole import parts_of
from tlt_server.frontend.dialects.sglang.requests import GenerateFields
from tlt_server.frontend.generation.choice import Delta, FinishedChoice
from tlt_server.frontend.generation.delivery import EventStream, LargeEvent, event_frame, reply
from tlt_server.frontend.generation.generation import Generation
from tlt_server.frontend.generation.items import FinishedItem, TokenEvent
from tlt_server.frontend.generation.requests import RequestBatch
from tlt_server.frontend.generation.text import Incremental, StopStrings, Text
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.http.replies import error_reply, sliced_response
from tlt_server.frontend.service import Service
from tlt_server.wire.labels import label_of
from tlt_server.wire.records import TokenLogprobs

# Bytes of all cumulative chunks of a choice, the last one not counted. An increment of one token
# without log-probs takes about BYTES_PER_TOKEN with its meta_info, so the sum stays of the order of
# increments. A token with 20 alternatives alone takes 350 to 650.
FREE_BYTES = 64 * 1024
BYTES_PER_TOKEN = 256
META_BYTES = 320  # about what a chunk has without its lists and text


Spell = Callable[[int], str | None]  # the text of a token in a triple; None: it has none


class Generated(Struct, frozen=True, kw_only=True):
    """One choice; in a stream, all of it so far."""

    text: Annotated[str, "the output as text"]
    output_ids: Annotated[list[int], "the output, its stop token included"]
    meta_info: Annotated[MetaInfo, "figures of it"]
    index: Annotated[
        int | UnsetType, "p * n + i for choice i of prompt p; in a stream of several"
    ] = UNSET


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
    """The lists of a choice in a reply, each in a form that `json_slices` encodes: list, iterator
    or JSON.
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
        """Return True if a chunk should be sent now, before the choice ends."""
        return self._asked.incremental_streaming_output or self._credit >= self._size

    @property
    def lists(self) -> OutputLists:
        return OutputLists(self._ids.raw(), self._scored.raw(), self._top.raw())

    def final_text(self, text: str) -> str:
        """Return the part of the whole text that the last chunk shows."""
        return text[self._shown :]

    def sent(self) -> None:
        """Note that a chunk has shown everything so far."""
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
        """Return the text that the tokens add, special tokens included. A possible beginning of a
        stop string is held back.
        """
        assert self._spelled is not None
        text = "".join(map(self._spelled.push, token_ids))
        return self._stops.push(text, armed=False)


def scored(logprobs: Sequence[float], token_ids: Sequence[int], spell: Spell) -> Iterable[Triple]:
    return ((value, token, spell(token)) for value, token in zip(logprobs, token_ids, strict=True))


def triples(best: TokenLogprobs, spell: Spell) -> list[Triple]:
    return [*scored(best.logprobs, best.token_ids, spell)]


async def generate(service: Service, request: Request, asked: GenerateFields) -> Response:
    batch, generation = await service.begin(asked.native(), caller_of(request), asked.words)
    phrase = GeneratedPhrase(service, asked, batch)
    if asked.stream:
        events = _chunks(phrase, generation)
        return EventStream(events, generation, lambda error: [event_frame(error_reply(error))])
    return await reply(request, _whole(phrase, batch, generation), generation)


async def _whole(phrase: GeneratedPhrase, batch: RequestBatch, generation: Generation) -> Response:
    choices, _ = await parts_of(generation, batch, phrase.whole)
    return sliced_response(choices if phrase.asked.several else choices[0], generation.turn)


async def _chunks(phrase: GeneratedPhrase, generation: Generation) -> AsyncIterator[LargeEvent]:
    async for event in generation.successes():
        if isinstance(event, TokenEvent):
            chunk = phrase.chunk(event, generation.cached_tokens(event.id))
            if chunk is not None:
                yield LargeEvent(chunk, generation.turn)


class GeneratedPhrase:
    """The reply in SGLang's form, whole or in chunks."""

    def __init__(self, service: Service, asked: GenerateFields, batch: RequestBatch) -> None:
        self.asked, self._service = asked, service
        self._positions = batch.positions
        self._prompts = {item.id: item.requests[0].token_ids for item in batch.items}
        self._stops = batch.items[0].requests[0].sampling.stop
        self._started_s = time.monotonic()
        self._growing: dict[int, GrowingOutput] = {}  # by index, in a stream

    async def whole(self, item: FinishedItem, choice: FinishedChoice) -> Generated:
        """Return a choice. Long lists are created as they are encoded."""
        best = choice.top_logprobs or ()
        alternatives = len(best[-1].token_ids) if best else 0
        ids = choice.token_ids if self.asked.return_logprob else []  # those that are spelled
        lists = OutputLists(
            choice.token_ids,
            made(scored(choice.logprobs[: len(ids)], ids, self._spell), len(ids)),
            made((triples(each, self._spell) for each in best), len(best) * (1 + alternatives)),
        )
        meta = self._meta(item.id, choice.index, len(choice.token_ids), lists, item.cached_tokens)
        return Generated(
            text=self._final_text(choice),
            output_ids=lists.ids,
            meta_info=ended(meta, choice, **self._prompt(item.id, choice)),
        )

    def chunk(self, event: TokenEvent, cached_tokens: int) -> Generated | None:
        """Return the chunk with new tokens, or None to leave them to a later chunk."""
        id, delta, choice = event
        # Prompt-major, from 0.
        index = self._positions[id] * self.asked.sampling_params.n + delta.index
        growing = self._growing.get(index)
        if growing is None:
            growing = GrowingOutput(self.asked, self._service.text, self._stops, self._spell)
            self._growing[index] = growing
        growing.add(delta)
        if choice is None and not (delta.token_ids and growing.due):
            return None
        lists = growing.lists
        meta = self._meta(id, delta.index, growing.tokens, lists, cached_tokens)
        chunk = Generated(
            text=growing.text if choice is None else growing.final_text(self._final_text(choice)),
            output_ids=lists.ids,
            meta_info=meta if choice is None else ended(meta, choice, **self._prompt(id, choice)),
            index=index if self.asked.several else UNSET,
        )
        growing.sent()
        if choice is not None:
            del self._growing[index]
        return chunk

    def _meta(
        self, id: str, index: int, tokens: int, lists: OutputLists, cached_tokens: int
    ) -> MetaInfo:
        asked = self.asked
        alternatives = asked.return_logprob and asked.top_logprobs_num and tokens
        return MetaInfo(
            id=id if asked.sampling_params.n == 1 else f"{id}_{index}",
            finish_reason=None,
            prompt_tokens=len(self._prompts[id]),
            completion_tokens=tokens,
            cached_tokens=cached_tokens,
            weight_version=label_of(self._service.info.weight_version),
            e2e_latency=time.monotonic() - self._started_s,
            output_token_logprobs=lists.scored if asked.return_logprob else UNSET,
            output_top_logprobs=lists.top if alternatives else UNSET,
        )

    def _prompt(self, id: str, choice: FinishedChoice) -> dict[str, Any]:
        """Return the prompt's log-probs from the requested token on. If none are requested, return
        the last token without a log-prob, as clients of SGLang expect.
        """
        if not self.asked.return_logprob:
            return {}
        if not isinstance(choice.prompt_logprobs, list):
            last = self._prompts[id][-1]
            return {"input_token_logprobs": [(None, last, self._spell(last))]}
        count, start = self.asked.top_logprobs_num, self.asked.logprob_start_len
        prompt, logprobs = [*self._prompts[id]], choice.prompt_logprobs

        def found() -> Iterator[Scored]:
            return islice(scored_prompt(prompt, logprobs, count), start, None)

        fields: dict[str, Any] = {
            "input_token_logprobs": (
                (each.logprob, each.token_id, self._spell(each.token_id)) for each in found()
            )
        }
        if count:
            fields["input_top_logprobs"] = (
                None if each.logprob is None else triples(each.best, self._spell)
                for each in found()
            )
        return fields

    def _spell(self, token_id: int) -> str | None:
        """Return the text of a token for its log-prob, if requested."""
        asked = self.asked.return_text_in_logprobs
        return self._service.pieces[token_id].text if asked else None

    def _final_text(self, choice: FinishedChoice) -> str:
        """Return the text with or without special tokens and the stop, as the request asks."""
        params, text = self.asked.sampling_params, choice.text or ""
        stopped_by_token = choice.finish_reason == "stop" and not isinstance(
            choice.stop_reason, str
        )
        if not params.skip_special_tokens or (params.no_stop_trim and stopped_by_token):
            text = self._decode(
                choice.token_ids[:-1]
                if stopped_by_token and not params.no_stop_trim
                else choice.token_ids
            )
            if isinstance(choice.stop_reason, str):
                text = text.partition(choice.stop_reason)[0]
        return (
            text + choice.stop_reason
            if params.no_stop_trim and isinstance(choice.stop_reason, str)
            else text
        )

    def _decode(self, token_ids: list[int]) -> str:
        return self._service.text.decode(
            token_ids, special=not self.asked.sampling_params.skip_special_tokens
        )
