"""Generation in SGLang's form: one reply or a list, log-probs as triples, and streams whose chunks
hold the whole output so far, or increments.

`POST /generate` calls this for bodies with `text` or `input_ids`. Errors have the native shape,
which contains SGLang's.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from tlt_server.errors import TltError
from tlt_server.frontend.dialects.replies.logprobs import Scored, made, scored_prompt
from tlt_server.frontend.dialects.replies.meta_info import MetaInfo, ended
from tlt_server.frontend.dialects.sglang.growing import GrowingOutput, OutputLists, scored, triples
from tlt_server.frontend.dialects.sglang.replies import Generated
from tlt_server.frontend.dialects.sglang.requests import GenerateFields
from tlt_server.frontend.generation.batch import RequestBatch
from tlt_server.frontend.generation.choice import Delta, FinishedChoice
from tlt_server.frontend.generation.delivery import EventStream, LargeEvent, event_frame, reply
from tlt_server.frontend.generation.generation import Generation
from tlt_server.frontend.generation.items import FailedItem, FinishedItem, TokenEvent
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.http.replies import error_reply, sliced_response, unexpected
from tlt_server.frontend.http.slices import SLICE_BYTES
from tlt_server.frontend.service import Service
from tlt_server.wire.labels import label_of


async def generate(service: Service, request: Request, asked: GenerateFields) -> Response:
    assert service.engine.info is not None
    caller = caller_of(request)
    batch = await service.validator.batch(asked.native(), service.engine.info, caller, asked.words)
    phrase = Phrase(service, asked, batch)
    generation = await service.start(batch, caller.name)
    if asked.stream:
        return EventStream(_chunks(phrase, generation), generation)
    return await reply(request, _whole(phrase, generation), generation)


async def _whole(phrase: Phrase, generation: Generation) -> Response:
    found: dict[int, Generated] = {}
    async for event in generation.events():
        if isinstance(event, FailedItem):
            raise event.error
        if isinstance(event, FinishedItem):
            for choice in event.choices:
                await generation.turn(SLICE_BYTES)  # its text may be decoded again
                index = phrase.index_of(event.id, choice.index)
                found[index] = phrase.whole(event.id, choice, event.cached_tokens)
    choices = [found[index] for index in sorted(found)]
    return sliced_response(choices if phrase.asked.several else choices[0], generation.turn)


async def _chunks(phrase: Phrase, generation: Generation) -> AsyncIterator[bytes | LargeEvent]:
    try:
        async for event in generation.events():
            match event:
                case TokenEvent(id, delta, choice):
                    chunk = phrase.chunk(id, delta, choice, generation.cached_tokens(id))
                    if chunk is not None:
                        yield LargeEvent(chunk, generation.turn)
                case FailedItem(_, error):
                    raise error
    except TltError as error:
        yield event_frame(error_reply(error))
    except Exception as error:  # a bug of ours; the status is sent, so the stream shows it
        yield event_frame(error_reply(unexpected(error)))
    yield b"data: [DONE]\n\n"


class Phrase:
    """The reply in SGLang's form, whole or in chunks."""

    def __init__(self, service: Service, asked: GenerateFields, batch: RequestBatch) -> None:
        self.asked, self._service = asked, service
        self._positions = {item.id: i for i, item in enumerate(batch.items)}
        self._prompts = {item.id: item.requests[0].token_ids for item in batch.items}
        self._stops = batch.items[0].requests[0].sampling.stop
        self._started_s = time.monotonic()
        self._growing: dict[int, GrowingOutput] = {}  # by index, in a stream

    def index_of(self, id: str, choice: int) -> int:
        """Return the index in the reply of a choice of a prompt: prompt-major, from 0."""
        return self._positions[id] * self.asked.sampling_params.n + choice

    def whole(self, id: str, choice: FinishedChoice, cached_tokens: int) -> Generated:
        """Return a choice. Its lists, if they are long, are made when they are encoded."""
        best = choice.top_logprobs or ()
        alternatives = len(best[-1].token_ids) if best else 0
        ids = choice.token_ids if self.asked.return_logprob else []  # those that are spelled
        lists = OutputLists(
            choice.token_ids,
            made(scored(choice.logprobs[: len(ids)], ids, self._spell), len(ids)),
            made((triples(each, self._spell) for each in best), len(best) * (1 + alternatives)),
        )
        meta = self._meta(id, choice.index, len(choice.token_ids), lists, cached_tokens)
        return Generated(
            text=self._final_text(choice),
            output_ids=lists.ids,
            meta_info=ended(meta, choice, **self._prompt(id, choice)),
        )

    def chunk(
        self, id: str, delta: Delta, choice: FinishedChoice | None, cached_tokens: int
    ) -> Generated | None:
        """Return the chunk that shows a delta, or None if that is left to a later one."""
        index = self.index_of(id, delta.index)
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
        asked, info = self.asked, self._service.engine.info
        assert info is not None
        alternatives = asked.return_logprob and asked.top_logprobs_num and tokens
        return MetaInfo(
            id=id if asked.sampling_params.n == 1 else f"{id}_{index}",
            finish_reason=None,
            prompt_tokens=len(self._prompts[id]),
            completion_tokens=tokens,
            cached_tokens=cached_tokens,
            weight_version=label_of(info.weight_version),
            e2e_latency=time.monotonic() - self._started_s,
            output_token_logprobs=lists.scored if asked.return_logprob else UNSET,
            output_top_logprobs=lists.top if alternatives else UNSET,
        )

    def _prompt(self, id: str, choice: FinishedChoice) -> dict[str, Any]:
        """Return the prompt's log-probs from the token on from which they are asked for. Where none
        are, it is the last token without one, as clients of SGLang expect.
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
        """Return the text of a token for its log-prob, where it is asked for."""
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
