"""The way of a request from its body to its reply, whole or in chunks.

A reply is complete or an error: the first item that fails ends the request with its error, which in
a stream is a chunk `{"error": ...}` before `[DONE]`.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any, NamedTuple

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from tlt_server.frontend.dialects.models import adapter_of
from tlt_server.frontend.dialects.openai.conversations import Held
from tlt_server.frontend.dialects.openai.phrases import ChatPhrase, CompletionPhrase
from tlt_server.frontend.dialects.openai.replies import ChatChoice, CompletionChoice, failure
from tlt_server.frontend.dialects.openai.requests import Asked, StreamOptions
from tlt_server.frontend.dialects.replies.logprobs import whole
from tlt_server.frontend.dialects.replies.whole import OpenAIUsage, UsageCount, parts_of
from tlt_server.frontend.generation.choice import FinishedChoice
from tlt_server.frontend.generation.delivery import EventStream, LargeEvent, event_frame, reply
from tlt_server.frontend.generation.generation import Generation
from tlt_server.frontend.generation.items import FinishedItem
from tlt_server.frontend.generation.requests import RequestBatch, Words
from tlt_server.frontend.http.access import given_id
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.http.replies import sliced_response
from tlt_server.frontend.service import Service
from tlt_server.wire.packed import PackedIds

QUESTION = [{"role": "user", "content": "Compute 3*4+5."}]


class Prompted(NamedTuple):
    """The prompts of a request, the structure of the answers, and the client's names of fields."""

    prompts: list[str | PackedIds]
    words: Words
    held: Held


async def answer(
    service: Service,
    request: Request,
    asked: Asked,
    native: Prompted,
    kind: str,
    phrase_of: Callable[[Service, Any, RequestBatch, str], CompletionPhrase | ChatPhrase],
) -> Response:
    """Generate, and reply in the words of `phrase_of`."""
    name = asked.request_id or given_id(request.headers.raw) or uuid.uuid4().hex
    id = f"{kind}-{name}"
    batch, generation = await begun(service, request, asked, native, (name, id))
    phrase = phrase_of(service, asked, batch, id)
    if asked.stream:
        events = _chunks(phrase, batch, generation, asked.stream_options)
        return EventStream(events, generation, lambda error: [event_frame(failure(error))])
    return await reply(request, _whole(phrase, batch, generation), generation)


async def begun(
    service: Service, request: Request, asked: Asked, native: Prompted, names: Collection[str]
) -> tuple[RequestBatch, Generation]:
    """Admit the prompts and begin to generate. `names`: those by which all can be aborted."""
    field, structure = native.held
    return await service.begin(
        asked.native(native.prompts, structure, adapter_of(service, asked.model)),
        caller_of(request),
        native.words.structured_by(field),
        asked.reading(),
        names,
    )


async def _whole(
    phrase: CompletionPhrase | ChatPhrase, batch: RequestBatch, generation: Generation
) -> Response:
    positions = batch.positions

    async def made(item: FinishedItem, choice: FinishedChoice) -> CompletionChoice | ChatChoice:
        cached, turn = item.cached_tokens, generation.turn
        return await phrase.part(positions[item.id], whole(choice), choice, cached, turn)

    parts, count = await parts_of(generation, batch, made)
    return sliced_response(phrase.reply(parts, count.openai()), generation.turn)  # type: ignore[arg-type]


async def _chunks(
    phrase: CompletionPhrase | ChatPhrase,
    batch: RequestBatch,
    generation: Generation,
    options: StreamOptions,
) -> AsyncIterator[bytes | LargeEvent]:
    positions, count, usage = batch.positions, UsageCount(), options.include_usage
    far = UsageCount(sum(len(item.requests[0].token_ids) for item in batch.items))
    async for event in generation.successes():
        if isinstance(event, FinishedItem):
            count.add(event)
            continue
        id, delta, ended = event
        far.completion_tokens += len(delta.token_ids)
        so_far: OpenAIUsage | None | UnsetType = None if usage else UNSET
        if usage and options.continuous_usage_stats:
            far.cached_tokens = sum(map(generation.cached_tokens, positions))
            so_far = far.openai()
        cached = generation.cached_tokens(id) if ended is not None else 0
        part = await phrase.part(positions[id], delta, ended, cached, generation.turn)
        chunk = phrase.reply([part], so_far)  # type: ignore[list-item]
        if delta.prompt_logprobs:
            yield LargeEvent(chunk, generation.turn)
        else:
            yield event_frame(chunk)
    if usage:
        yield event_frame(phrase.reply([], count.openai()))
