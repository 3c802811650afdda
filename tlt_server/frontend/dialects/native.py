"""The native dialect: `POST /generate` with a batch of requests; a JSON reply, or server-sent events as items finish.

A JSON reply has one entry per item, in order of the request: a result or an error. When no item succeeded its status is the first
error's. Events: `token`, `result`, `error` (one per item), and a last `done`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import closing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tlt_server.errors import Cancelled, TltError
from tlt_server.frontend.generation import Event, Generation, ItemError, ItemResult, Service, TokenEvent
from tlt_server.frontend.replies import error_body, json_response, unexpected
from tlt_server.frontend.requests import parse
from tlt_server.frontend.validation import Batch


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, result: ItemResult) -> None:
        self.prompt_tokens += result.prompt_tokens
        self.cached_tokens += result.cached_tokens
        self.completion_tokens += sum(len(choice.token_ids) for choice in result.choices)


def routes(service: Service) -> list[Route]:
    async def generate(request: Request) -> Response:
        service.engine.check_available()
        asked = parse(await request.body())
        service.engine.check_available()  # the body may have taken its time
        assert service.engine.info is not None
        batch = await service.validator.batch(asked, service.engine.info)
        generation = service.start(batch)  # a batch that is not admitted is an HTTP error, not a stream
        if batch.stream:
            return EventStream(service, batch, generation)
        with closing(generation):
            return await _unless_disconnected(request, _collect(service, batch, generation))

    return [Route("/generate", generate, methods=["POST"])]


def _phrase(event: Event) -> tuple[str, dict[str, Any]]:
    match event:
        case TokenEvent(id, delta):
            return "token", {"id": id, **msgspec.structs.asdict(delta)}
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


class EventStream(StreamingResponse):
    """Server-sent events; whatever ends the response also ends the generation."""

    def __init__(self, service: Service, batch: Batch, generation: Generation) -> None:
        super().__init__(_frames(service, batch, generation), media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with closing(self._generation):
            await super().__call__(scope, receive, send)


async def _frames(service: Service, batch: Batch, generation: Generation) -> AsyncIterator[bytes]:
    usage, waiting = Usage(), {item.id for item in batch.items}
    try:
        async for event in generation.events():
            if isinstance(event, ItemResult):
                usage.add(event)
            if not isinstance(event, TokenEvent):
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


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Run `work`, but cancel it (which aborts its sequences) as soon as the client hangs up."""
    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Cancelled("the client disconnected; its sequences were aborted")
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
