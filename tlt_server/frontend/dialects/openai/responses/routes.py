"""Routes of the Responses API."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response

from tlt_server.errors import NotFound, TltError
from tlt_server.frontend.dialects.models import named
from tlt_server.frontend.dialects.openai.answers import read, started
from tlt_server.frontend.dialects.openai.conversations import prepared
from tlt_server.frontend.dialects.openai.messages import ChatMessage
from tlt_server.frontend.dialects.openai.responses.growing import (
    GrowingResponse,
    Keep,
    kept_messages,
)
from tlt_server.frontend.dialects.openai.responses.items import messages_of
from tlt_server.frontend.dialects.openai.responses.replies import (
    EVENTS,
    Deleted,
    ModelResponse,
    ResponseEvent,
)
from tlt_server.frontend.dialects.openai.responses.requests import RESPONSE, ResponseRequest
from tlt_server.frontend.dialects.replies.errors import UNFINISHED, failure_naming
from tlt_server.frontend.generation.delivery import EventStream, LargeEvent, event_frame, reply
from tlt_server.frontend.generation.generation import Generation
from tlt_server.frontend.generation.items import FailedItem, FinishedItem, TokenEvent
from tlt_server.frontend.http.access import given_id
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.http.endpoints import Parameter, Routes
from tlt_server.frontend.http.replies import json_response, unexpected
from tlt_server.frontend.service import Service

FIELDS = (*ResponseRequest.__struct_fields__, *ResponseRequest.refused, "tokens")
ROUTES = Routes(error_shape=failure_naming(FIELDS))
ID = Parameter("id", "path", "id of a response that is kept")


@ROUTES.post(
    "/v1/responses",
    needs="data",
    takes=ResponseRequest,
    example={"input": "Compute 3*4+5.", "max_output_tokens": 64},
    gives=ModelResponse,
    streams=tuple((name, ResponseEvent) for name in EVENTS),
    raises=(NotFound, *UNFINISHED),
)
async def create(service: Service, request: Request) -> Response:
    """Answer a conversation given as items, or continue one by `previous_response_id`.

    With `stream` the reply is typed events with numbers. Unknown fields are ignored, and null means
    absent.
    """
    asked, info = await read(service, request, ResponseRequest)
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
    ready = await prepared(service, request, chat, info, RESPONSE)
    id = f"resp_{uuid.uuid4().hex}"
    names = (id, asked.request_id or given_id(request.headers.raw) or id)
    _, generation = await started(
        service, request, chat, info, [ready.token_ids], RESPONSE, ready.held, names
    )
    growing = GrowingResponse(
        asked, id, caller.name, named(service, asked.model), ready.answer(), messages
    )
    keep = service.responses.keep
    if asked.stream:
        return EventStream(_frames(growing, generation, keep), generation)
    return await reply(request, _whole(growing, generation, keep), generation)


@ROUTES.get(
    "/v1/responses/{id}", needs="data", parameters=(ID,), gives=ModelResponse, raises=(NotFound,)
)
async def fetch(service: Service, request: Request) -> Response:
    """Return a response that is kept."""
    kept = service.responses.find(request.path_params["id"], caller_of(request))
    return Response(kept.body, media_type="application/json")


@ROUTES.delete(
    "/v1/responses/{id}",
    needs="data",
    parameters=(ID,),
    changes=True,
    gives=Deleted,
    raises=(NotFound,),
)
async def delete(service: Service, request: Request) -> Response:
    """Forget a response. Those that continue it stay."""
    id = request.path_params["id"]
    service.responses.delete(id, caller_of(request))
    return json_response(Deleted(id))


async def _whole(growing: GrowingResponse, generation: Generation, keep: Keep) -> Response:
    async for event in generation.events():
        match event:
            case TokenEvent():
                async for _ in growing.take(event, generation.turn):
                    pass
            case FinishedItem():
                for _ in growing.finish(event, keep):
                    pass
            case FailedItem(_, error):
                raise error
    return json_response(growing.response)


async def _frames(
    growing: GrowingResponse, generation: Generation, keep: Keep
) -> AsyncIterator[bytes | LargeEvent]:
    try:
        for first in growing.begin():
            yield _frame(first)
        async for event in generation.events():
            match event:
                case TokenEvent():
                    async for each in growing.take(event, generation.turn):
                        yield _frame(each)
                case FinishedItem():
                    for each in growing.finish(event, keep):
                        yield _frame(each)
                case FailedItem(_, error):
                    raise error
    except TltError as error:
        for each in growing.fail(error):
            yield _frame(each)
    except Exception as error:  # a bug of ours; the status is sent, so the stream shows it
        for each in growing.fail(unexpected(error)):
            yield _frame(each)


def _frame(event: ResponseEvent) -> bytes:
    return event_frame(event, event.type)
