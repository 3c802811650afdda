"""The way of a request from its body to its reply, whole or in chunks.

A reply is complete or an error: the first item that fails ends the request with its error, which in
a stream is a chunk `{"error": ...}` before `[DONE]`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection
from typing import TypeVar

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from tlt_server.errors import TltError
from tlt_server.frontend.dialects.models import adapter_of, named
from tlt_server.frontend.dialects.openai.forced import Held
from tlt_server.frontend.dialects.openai.phrases import ChatPhrase, CompletionPhrase
from tlt_server.frontend.dialects.openai.replies import failure
from tlt_server.frontend.dialects.openai.requests import (
    Asked,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
)
from tlt_server.frontend.dialects.openai.responses.requests import ResponseRequest
from tlt_server.frontend.dialects.replies.logprobs import Speller, whole
from tlt_server.frontend.dialects.replies.usage import OpenAIUsage, UsageCount, usage_of
from tlt_server.frontend.generation.batch import RequestBatch, Words
from tlt_server.frontend.generation.delivery import EventStream, LargeEvent, event_frame, reply
from tlt_server.frontend.generation.generation import Generation
from tlt_server.frontend.generation.items import FailedItem, FinishedItem, TokenEvent
from tlt_server.frontend.http.access import given_id
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.http.endpoints import Unread
from tlt_server.frontend.http.replies import sliced_response, unexpected
from tlt_server.frontend.http.slices import SLICE_BYTES
from tlt_server.frontend.link.admission import Demand
from tlt_server.frontend.service import Service
from tlt_server.wire.events import EngineInfo
from tlt_server.wire.packed import PackedIds

Phrase = CompletionPhrase | ChatPhrase
Body = TypeVar("Body", bound=Asked | ResponseRequest | TokenizeRequest | DetokenizeRequest)
QUESTION = [{"role": "user", "content": "Compute 3*4+5."}]


async def read(
    service: Service, request: Request, body: Unread[Body], *, generates: bool = True
) -> tuple[Body, EngineInfo]:
    """Return the body of a request. `Unavailable`: it could not be answered now."""
    check = service.engine.check_available if generates else service.engine.check_running
    check()
    await request.body()
    check()  # again, since reading the body may take long
    if generates:
        # Checked before a large body is parsed.
        service.engine.check_room(Demand(sequences=1, owner=caller_of(request).name))
    asked = await body.read()
    adapter_of(service, asked.model)
    assert service.engine.info is not None
    return asked, service.engine.info


async def answer(
    service: Service,
    request: Request,
    asked: Asked,
    info: EngineInfo,
    prompts: list[str | PackedIds],
    words: Words,
    held: Held,
    kind: str,
    phrase_of: Callable[..., Phrase],
) -> Response:
    """Generate for these prompts, and reply in the words of `phrase_of`."""
    id, names = _ids(request, kind, asked.request_id)
    batch, generation = await started(service, request, asked, info, prompts, words, held, names)
    speller = Speller(
        service.pieces, as_ids=asked.return_tokens_as_token_ids or service.text.tokenizer is None
    )
    stops = () if asked.stop_token_ids is UNSET else asked.stop_token_ids
    phrase = phrase_of(
        asked,
        batch,
        service.text,
        speller,
        frozenset(info.eos_token_ids) - {*stops},
        id,
        int(time.time()),
        named(service, asked.model),
    )
    if asked.stream:
        return EventStream(_chunks(phrase, batch, generation, asked.stream_options), generation)
    return await reply(request, _whole(phrase, batch, generation), generation)


def _ids(request: Request, kind: str, given: str | None) -> tuple[str, tuple[str, str]]:
    """Return the id of the reply, and the names by which its sequences can be aborted."""
    name = given or given_id(request.headers.raw) or uuid.uuid4().hex
    return f"{kind}-{name}", (name, f"{kind}-{name}")


async def started(
    service: Service,
    request: Request,
    asked: Asked,
    info: EngineInfo,
    prompts: list[str | PackedIds],
    words: Words,
    held: Held,
    names: Collection[str],
) -> tuple[RequestBatch, Generation]:
    """Admit the prompts and begin to generate."""
    field, structure = held
    batch = await service.validator.batch(
        asked.native(prompts, structure, adapter_of(service, asked.model)),
        info,
        caller_of(request),
        words.structured_by(field),
        asked.reading(),
    )
    return batch, await service.start(batch, caller_of(request).name, names=names)


async def _whole(phrase: Phrase, batch: RequestBatch, generation: Generation) -> Response:
    positions, count, parts = _positions(batch), UsageCount(), []
    async for event in generation.events():
        if isinstance(event, FailedItem):
            raise event.error
        if isinstance(event, FinishedItem):
            count.add(event)
            for choice in event.choices:
                await generation.turn(SLICE_BYTES)
                delta = whole(choice)
                await phrase.hear(delta, True, generation.turn)
                part = phrase.part(positions[event.id], delta, choice, event.cached_tokens)
                parts.append(part)
    parts.sort(key=lambda part: part.index)
    return sliced_response(phrase.reply(parts, count.usage()), generation.turn)  # type: ignore[arg-type]


async def _chunks(
    phrase: Phrase, batch: RequestBatch, generation: Generation, options: StreamOptions
) -> AsyncIterator[bytes | LargeEvent]:
    positions, count, usage = _positions(batch), UsageCount(), options.include_usage
    prompt_tokens = sum(len(item.requests[0].token_ids) for item in batch.items)
    made = 0
    try:
        async for event in generation.events():
            match event:
                case TokenEvent(id, delta, ended):
                    made += len(delta.token_ids)
                    so_far: OpenAIUsage | None | UnsetType = None if usage else UNSET
                    if usage and options.continuous_usage_stats:
                        cached = sum(map(generation.cached_tokens, positions))
                        so_far = usage_of(prompt_tokens, made, cached)
                    await phrase.hear(delta, ended is not None, generation.turn)
                    cached = generation.cached_tokens(id) if ended is not None else 0
                    part = phrase.part(positions[id], delta, ended, cached)
                    chunk = phrase.reply([part], so_far)  # type: ignore[list-item]
                    if not delta.prompt_logprobs:
                        yield event_frame(chunk)
                        continue
                    yield LargeEvent(chunk, generation.turn)
                case FinishedItem():
                    count.add(event)
                case FailedItem(_, error):
                    raise error
        if usage:
            yield event_frame(phrase.reply([], count.usage()))
    except TltError as error:
        yield event_frame(failure(error))
    except Exception as error:  # a bug of ours; the status is sent, so the stream shows it
        yield event_frame(failure(unexpected(error)))
    yield b"data: [DONE]\n\n"


def _positions(batch: RequestBatch) -> dict[str, int]:
    return {item.id: i for i, item in enumerate(batch.items)}
