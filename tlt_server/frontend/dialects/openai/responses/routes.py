"""Routes of the Responses API."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Literal

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from tlt_server.errors import InvalidRequest, NotFound, TltError
from tlt_server.frontend.dialects.borrowed import generating, named
from tlt_server.frontend.dialects.openai.answers import begun, prepared
from tlt_server.frontend.dialects.openai.messages import ChatMessage
from tlt_server.frontend.dialects.openai.responses.growing import (
    GrowingResponse,
    Keep,
    kept_messages,
)
from tlt_server.frontend.dialects.openai.responses.replies import (
    EVENTS,
    CancelledResponse,
    Deleted,
    InputItems,
    ModelResponse,
    ResponseEvent,
)
from tlt_server.frontend.dialects.openai.responses.requests import (
    RESPONSE,
    Conversation,
    ResponseRequest,
    messages_of,
)
from tlt_server.frontend.dialects.replies.errors import UNFINISHED, failure_naming
from tlt_server.frontend.dialects.replies.logprobs import whole
from tlt_server.frontend.generation.delivery import EventStream, reply
from tlt_server.frontend.generation.generation import Generation
from tlt_server.frontend.generation.items import FinishedItem, TokenEvent
from tlt_server.frontend.http.access import given_id
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.http.endpoints import Routes
from tlt_server.frontend.http.fields import shown
from tlt_server.frontend.http.keys import Caller
from tlt_server.frontend.http.replies import json_response, sliced_response
from tlt_server.frontend.service import Service

FIELDS = (*ResponseRequest.__struct_fields__, *ResponseRequest.refused, "tokens")
ROUTES = Routes(needs="data", error_shape=failure_naming(FIELDS))
PREFIX = "resp_"
ResponseId = Annotated[str, "id of a response that is kept"]


@ROUTES.post(
    "/v1/responses",
    read=generating,
    example={"input": "Compute 3*4+5.", "max_output_tokens": 64},
    streams=tuple((name, ResponseEvent) for name in EVENTS),
    raises=(NotFound, *UNFINISHED),
)
async def create(
    service: Service, request: Request, asked: ResponseRequest
) -> Annotated[Response, ModelResponse]:
    """Answer a conversation given as items, or continue one by `previous_response_id`.

    With `stream` the reply is typed events with numbers. Unknown fields are ignored, and null means
    absent.
    """
    caller = caller_of(request)
    messages: list[ChatMessage] = []
    if asked.previous_response_id is not None:
        messages += kept_messages(service.responses.find(asked.previous_response_id, caller))
    messages += messages_of(asked.input)
    said = (
        []
        if asked.instructions is None
        else [ChatMessage(role="system", content=asked.instructions)]
    )
    chat = asked.for_chat([*said, *messages])
    prompted = await prepared(service, request, chat, RESPONSE)
    id = f"{PREFIX}{uuid.uuid4().hex}"
    names = (id, asked.request_id or given_id(request.headers.raw) or id)
    _, generation = await begun(service, request, chat, prompted, names)
    growing = GrowingResponse(
        asked, id, caller.name, named(service, asked.model), prompted.reader(), messages
    )
    keep = service.responses.keep
    if not asked.stream:
        return await reply(request, _whole(growing, generation, keep), generation)

    def failed(error: TltError) -> list[bytes]:
        growing.fail(error)
        return growing.frames()

    return EventStream(_stream(growing, generation, keep), generation, failed, end=b"")


@ROUTES.get("/v1/responses/{id}", raises=(NotFound,))
async def fetch(
    service: Service, caller: Caller, id: ResponseId
) -> Annotated[Response, ModelResponse]:
    """Return a response that is kept."""
    kept = service.responses.find(id, caller)
    return Response(kept.body, media_type="application/json")


@ROUTES.delete("/v1/responses/{id}", changes=True, raises=(NotFound,))
async def delete(service: Service, caller: Caller, id: ResponseId) -> Deleted:
    """Forget a response. Those that continue it stay."""
    service.responses.delete(id, caller)
    return Deleted(id)


@ROUTES.get("/v1/responses/{id}/input_items", raises=(NotFound,))
async def input_items(
    service: Service,
    caller: Caller,
    id: ResponseId,
    limit: Annotated[int, "items at most", Meta(ge=1, le=100)] = 20,
    order: Annotated[Literal["asc", "desc"], "desc: the newest first"] = "desc",
    after: Annotated[str | None, "id of the item after which the list begins"] = None,
) -> Annotated[Response, InputItems]:
    """List the items from which a response that is kept was made, those before it included."""
    kept = service.responses.find(id, caller)
    items = Conversation(kept.id, kept_messages(kept)[:-1])
    numbers = range(len(items))
    if order == "desc":
        numbers = numbers[::-1]
    if after is not None:
        before = items.number_of(after)
        if before is None:
            raise InvalidRequest(
                f"after is {shown(after)}, which is not an item of this response; send the "
                "last_id of the page before"
            )
        numbers = numbers[numbers.index(before) + 1 :]
    found = [items[number] for number in numbers[:limit]]
    first, last = (found[0]["id"], found[-1]["id"]) if found else (None, None)
    turn = service.generations.share.of(caller.name)
    return sliced_response(InputItems(found, first, last, limit < len(numbers)), turn)


@ROUTES.post("/v1/responses/{id}/cancel", changes=True, raises=(NotFound,))
async def cancel(service: Service, caller: Caller, id: ResponseId) -> CancelledResponse:
    """End a response that is under way with what it has; its stream gets the end."""
    if not id.startswith(PREFIX) or not service.abort([id], caller):
        service.responses.find(id, caller)
        raise InvalidRequest(
            f"the response {id[:100]} has ended; only a running one can be cancelled"
        )
    return CancelledResponse(id)


async def _whole(growing: GrowingResponse, generation: Generation, keep: Keep) -> Response:
    async for event in generation.successes():
        if isinstance(event, FinishedItem):
            [choice] = event.choices
            await growing.take(TokenEvent(event.id, whole(choice), choice), generation.turn)
            growing.finish(event, keep)
    return json_response(growing.response)


async def _stream(
    growing: GrowingResponse, generation: Generation, keep: Keep
) -> AsyncIterator[bytes]:
    growing.begin()
    for frame in growing.frames():
        yield frame
    async for event in generation.successes():
        if isinstance(event, TokenEvent):
            await growing.take(event, generation.turn)
        else:
            growing.finish(event, keep)
        for frame in growing.frames():
            yield frame
