"""The native dialect: `POST /generate` with a batch of requests; a JSON reply, or server-sent events as items finish.

A JSON reply has one entry per item, in order of the request: a result or an error. When no item succeeded its status is the first
error's. Events: `token`, `result`, `error` (one per item), and a last `done`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from tlt_client import wire
from tlt_client.wire import Done, Reply, Token
from tlt_server.errors import DeadlineExceeded, EngineFailed, QueueFull, TltError, Unavailable
from tlt_server.frontend.delivery import EventStream, reply
from tlt_server.frontend.endpoints import Endpoint
from tlt_server.frontend.generation import Event, Generation, ItemError, ItemResult, Service, TokenEvent
from tlt_server.frontend.replies import error_body, json_response, unexpected
from tlt_server.frontend.requests import NativeRequest, parse
from tlt_server.frontend.validation import Batch


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, result: ItemResult) -> None:
        self.prompt_tokens += result.prompt_tokens
        self.cached_tokens += result.cached_tokens
        self.completion_tokens += sum(len(choice.token_ids) for choice in result.choices)


def routes(service: Service) -> list[Endpoint]:
    async def generate(request: Request) -> Response:
        """Generate n choices for each prompt of a batch.

        All of the batch is admitted or nothing. The reply has one entry per item, in order: choices or an error; where no item
        succeeded, its status is the first error's. With `stream`, server-sent events: `token`, then `result` or `error` per item, and
        a last `done`.
        """
        service.engine.check_available()
        asked = parse(await request.body())
        service.engine.check_available()  # the body may have taken its time
        assert service.engine.info is not None
        batch = await service.validator.batch(asked, service.engine.info)
        generation = service.start(batch)  # a batch that is not admitted is an HTTP error, not a stream
        if batch.stream:
            return EventStream(_frames(service, batch, generation), generation)
        return await reply(request, _collect(service, batch, generation), generation)

    example = {"requests": [{"prompt": "2+2=", "n": 2, "seed": 7}], "sampling": {"max_tokens": 16, "temperature": 0.8}}
    return [Endpoint(
        "POST", "/generate", generate, takes=NativeRequest, example=example, gives=Reply, gives_also_at=(400, 500, 503, 504),
        streams=(("token", Token), ("result", wire.ItemResult), ("error", wire.ItemResult), ("done", Done)),
        raises=(QueueFull, EngineFailed, Unavailable, DeadlineExceeded))]


def _phrase(event: Event) -> tuple[str, dict[str, Any]]:
    match event:
        case TokenEvent(id, delta):
            return "token", {"id": id, **{name: value for name, value in msgspec.structs.asdict(delta).items() if value is not UNSET}}
        case ItemResult(id, choices):
            return "result", {"id": id, "choices": choices}
        case ItemError(id, error):
            return "error", {"id": id, "error": error_body(error)}


async def _collect(service: Service, batch: Batch, generation: Generation) -> Response:
    usage, by_id = Usage(), {}
    errors: list[TltError] = []
    async for event in generation.events():
        if isinstance(event, ItemResult):
            usage.add(event)
        elif isinstance(event, ItemError):
            errors.append(event.error)
        _, by_id[event.id] = _phrase(event)
    status = errors[0].http_status if len(errors) == len(batch.items) else 200
    return json_response({"results": [by_id[item.id] for item in batch.items], **_footer(service, usage)}, status)


async def _frames(service: Service, batch: Batch, generation: Generation) -> AsyncIterator[bytes]:
    usage, waiting = Usage(), {item.id for item in batch.items}
    try:
        async for event in generation.events():
            if isinstance(event, ItemResult):
                usage.add(event)
            if isinstance(event, TokenEvent):
                if not event.delta.token_ids and not event.delta.text:
                    continue  # the end of a choice, which the item's result tells
            else:
                waiting.discard(event.id)
            yield _frame(*_phrase(event))
    except Exception as error:  # our own bug, but the status line is long gone: say so in the stream
        for id in waiting:
            yield _frame(*_phrase(ItemError(id, unexpected(error, "/generate"))))
    yield _frame("done", _footer(service, usage))


def _frame(name: str, data: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"


def _footer(service: Service, usage: Usage) -> dict[str, Any]:
    return {"usage": usage, "numerics": service.numerics}
