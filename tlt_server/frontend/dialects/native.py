"""The native dialect: `POST /generate` takes a batch of requests and replies with JSON, or with
server-sent events as items finish.

A JSON reply has one entry per item, in the order of the request: a result or an error. If no item
succeeded, its status is that of the first error. The events are `token`, `result` or `error` (one
per item), and a last `done`. A body in SGLang's form is passed to `sglang.generate`.

A detached batch, or one with an Idempotency-Key, runs as a rollout. The routes in `ROLLOUTS`
follow, fetch, list and delete it. None of these needs the engine, so results can be fetched while
it restarts.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Annotated, Literal

from msgspec import UNSET, Meta
from starlette.requests import Request
from starlette.responses import Response

from tlt_client import wire
from tlt_client.wire import (
    Done,
    Progress,
    Reply,
    RolloutList,
    RolloutReply,
    RolloutStatus,
    RolloutSummary,
    Token,
)
from tlt_server.errors import (
    Conflict,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    NotFinite,
    NotFound,
    Overloaded,
    Poisoned,
    QueueFull,
    QueueTimeout,
    StorageFailed,
    StructureFailed,
    TltError,
    Unavailable,
)
from tlt_server.frontend.dialects.replies.whole import EndedItems, UsageCount, footer, phrase
from tlt_server.frontend.dialects.sglang.generate import Generated
from tlt_server.frontend.dialects.sglang.generate import generate as sglang
from tlt_server.frontend.dialects.sglang.requests import GenerateFields
from tlt_server.frontend.generation.delivery import (
    EventStream,
    LargeEvent,
    event_frame,
    reply,
    while_connected,
)
from tlt_server.frontend.generation.generation import Generation
from tlt_server.frontend.generation.items import FailedItem, FinishedItem, TokenEvent
from tlt_server.frontend.generation.requests import NativeRequest, RequestBatch
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.http.endpoints import HEADER, Routes
from tlt_server.frontend.http.fields import shown
from tlt_server.frontend.http.keys import Caller
from tlt_server.frontend.http.parsing import Forms, digest
from tlt_server.frontend.http.replies import Refusal, json_response, sliced_response
from tlt_server.frontend.link.admission import Demand
from tlt_server.frontend.rollouts.rollout import KeptRollout
from tlt_server.frontend.service import Service

MAX_KEY = 256
BORROWED = ("text", "input_ids")  # a body with one of these fields has SGLang's form
IdempotencyKey = Annotated[
    str | None,
    HEADER,
    "name of the batch, so that it never runs twice: 1 to 256 printable characters",
    Meta(min_length=1, max_length=MAX_KEY, pattern="^[!-~]+$"),
]
ROUTES = Routes(needs="data")
ITEM_ERRORS = (
    *(QueueTimeout, DeadlineExceeded, EngineFailed, NotFinite, Poisoned, StructureFailed),
    *(StorageFailed, Unavailable, Conflict),
)
EXAMPLE = {
    "requests": [{"prompt": "2+2=", "n": 2, "seed": 7}],
    "sampling": {"max_tokens": 16, "temperature": 0.8},
}
MAX_WAIT_S = 60.0
RolloutId = Annotated[str, "the id in the reply to the request that started the rollout"]
WaitForEnd = Annotated[
    float, "the longest time to wait for the end of the rollout", Meta(ge=0, le=MAX_WAIT_S)
]
ROLLOUTS = Routes(needs="data")


def _form(present: Mapping[str, bool]) -> type[NativeRequest] | type[GenerateFields]:
    """Return the form of a body; `InvalidRequest` if it has both forms or none."""
    given = [name for name, null in present.items() if not null]
    borrowed = [name for name in BORROWED if name in given]
    if borrowed and "requests" in given:
        raise InvalidRequest(
            f"the body has requests and {borrowed[0]}; requests is the native form, {borrowed[0]} "
            "SGLang's: send one"
        )
    if not given:
        raise InvalidRequest(
            "requests is missing; give requests, or, as SGLang's clients do, text or input_ids"
        )
    return GenerateFields if borrowed else NativeRequest


FORMS = Forms(("requests", *BORROWED), _form)


@ROUTES.post(
    "/generate",
    takes=NativeRequest | GenerateFields,
    example=EXAMPLE,
    gives_also_at=tuple({400, *(error.http_status for error in ITEM_ERRORS)}),
    others={202: RolloutStatus},
    headers={"X-Rollout-Id": "The rollout, of a batch that is detached or has an Idempotency-Key."},
    streams=(
        ("token", Token),
        ("result", wire.ItemResult),
        ("error", wire.ItemResult),
        ("done", Done),
        ("message", Generated),
        ("message", Refusal),
        ("message", Literal["[DONE]"]),
    ),
    raises=(QueueFull, Overloaded, *ITEM_ERRORS),
)
async def generate(
    service: Service, request: Request, idempotency_key: IdempotencyKey = None
) -> Annotated[Response, Reply, Generated, list[Generated]]:
    """Generate n choices for each prompt of a batch.

    The whole batch is admitted, or none of it. The reply has one entry per item, in order: choices
    or an error. If no item succeeded, its status is that of the first error. With `stream` the
    reply is server-sent events: `token`, then `result` or `error` per item, and a last `done`. With
    `detach` the reply comes at once, with status 202 and the id of a rollout, which `GET
    /rollouts/{id}` follows. With the header Idempotency-Key the batch continues when the client
    leaves, and the same request with the same key gets the same reply, never a second run.

    A body with `text` or `input_ids` in place of `requests` has SGLang's form, and so has its
    reply: one object, or a list for several prompts or choices. Chunks of a stream hold the whole
    output so far, or with `incremental_streaming_output` what is new, and `[DONE]` is the last.
    """
    key = _checked(idempotency_key)
    if not key:
        service.engine.check_available()
    body = await request.body()
    checksum = await digest(body) if key else ""
    rollout = service.rollouts.keyed(caller_of(request).name, key, checksum)
    if rollout is not None:
        return await _attached(service, request, rollout)
    # Checked before a large body is parsed.
    service.engine.check_room(Demand(sequences=1, owner=caller_of(request).name))
    asked = await service.bodies.read(FORMS, body)
    if isinstance(asked, GenerateFields):
        if key:
            raise InvalidRequest(
                f"the header Idempotency-Key is {shown(key)} and the body has SGLang's form, which "
                "no key makes idempotent: leave the header out, or send the body as requests"
            )
        return await sglang(service, request, asked)
    if asked.stream and (asked.detach or key):
        raise InvalidRequest(
            f"stream is true with {'detach' if asked.detach else 'an Idempotency-Key'}; a rollout "
            "is fetched, not streamed: leave one of the two out"
        )
    return await _answer(service, request, asked, key, checksum)


async def _answer(
    service: Service, request: Request, asked: NativeRequest, key: str, digest: str
) -> Response:
    caller = caller_of(request)
    making = service.validator.batch(asked, service.info, caller)
    if asked.detach or key:
        rollout = await service.rollouts.begin(
            await making, owner=caller.name, key=key, digest=digest, detached=asked.detach
        )
        return await _attached(service, request, rollout)
    batch = await making
    # A batch that is not admitted is an HTTP error, so it starts before any stream.
    generation = await service.generations.start(batch, caller.name)
    if batch.stream:
        return _stream(service, batch, generation)
    return await reply(request, _collect(service, batch, generation), generation)


async def _attached(service: Service, request: Request, rollout: KeptRollout) -> Response:
    if rollout.header.detached:
        response = json_response(RolloutStatus(rollout.header.id, rollout.status), 202)
    else:
        response = await while_connected(request, _done(service, rollout))
    response.headers["x-rollout-id"] = rollout.header.id
    return response


async def _done(service: Service, rollout: KeptRollout) -> Response:
    await rollout.wait()
    turn = service.generations.share.of(rollout.header.owner)
    ended = await EndedItems.of(await service.rollouts.results(rollout), turn)
    return ended.whole(service, ended.by_id, turn)


def _checked(key: str | None) -> str:
    """Return the Idempotency-Key, or an empty string."""
    if key is not None and not (re.fullmatch(r"[!-~]+", key) and len(key) <= MAX_KEY):
        raise InvalidRequest(
            f"the header Idempotency-Key is {shown(key)}; it must be 1 to {MAX_KEY} printable "
            "ASCII characters without spaces, such as a UUID"
        )
    return key or ""


async def _collect(service: Service, batch: RequestBatch, generation: Generation) -> Response:
    ended = EndedItems()
    async for event in generation.events():
        if not isinstance(event, TokenEvent):
            ended.take(event)
    return ended.whole(service, (item.id for item in batch.items), generation.turn)


def _stream(service: Service, batch: RequestBatch, generation: Generation) -> EventStream:
    usage, waiting = UsageCount(), {item.id: None for item in batch.items}

    async def frames() -> AsyncIterator[bytes | LargeEvent]:
        async for event in generation.events():
            if isinstance(event, FinishedItem):
                usage.add(event)
            name, data = phrase(event)
            if isinstance(event, TokenEvent):
                delta = event.delta
                if not delta.token_ids and not delta.text:
                    continue  # it only ends a choice, and the result has that
                if delta.prompt_logprobs is UNSET:  # else it may be large
                    yield event_frame(data, name)
                    continue
            else:
                del waiting[event.id]
            yield LargeEvent(data, generation.turn, name)
        yield event_frame(footer(service, usage), "done")

    def failed(error: TltError) -> Iterator[bytes]:
        for id in waiting:
            name, data = phrase(FailedItem(id, error))
            yield event_frame(data, name)
        yield event_frame(footer(service, usage), "done")

    return EventStream(frames(), generation, failed, end=b"")


@ROLLOUTS.get("/rollouts")
async def every(service: Service, caller: Caller) -> RolloutList:
    """List the kept rollouts that this key started, oldest first, without prompts and results.

    A key with the scope operate gets all of them.
    """
    return RolloutList(
        [
            RolloutSummary(
                rollout.header.id,
                rollout.status,
                rollout.header.detached,
                rollout.header.created_s,
                rollout.done_s,
                rollout.bytes,
                _progress(rollout),
                rollout.header.owner,
            )
            for rollout in service.rollouts
            if caller.sees(rollout.header.owner)
        ]
    )


@ROLLOUTS.get("/rollouts/{id}", raises=(NotFound,))
async def fetch(
    service: Service, request: Request, id: RolloutId, wait_s: WaitForEnd = 0
) -> Annotated[Response, RolloutReply]:
    """Fetch the results of a rollout so far, and whether it is done.

    With `?wait_s=`, at most 60, the reply comes when it is done or that time is up. Fetching
    changes nothing, so it may be repeated. Once a finished rollout was fetched, it may be forgotten
    early to make room for new ones.
    """
    caller = caller_of(request)
    rollout = service.rollouts.find(id, caller)

    async def when_done() -> Response:
        if wait_s and rollout.done_s is None:
            await rollout.wait(wait_s)
        turn = service.generations.share.of(caller.name)
        ended = await EndedItems.of(await service.rollouts.results(rollout), turn)
        results = ended.content(service, ended.by_id)
        return sliced_response(
            {
                "id": rollout.header.id,
                "status": rollout.status,
                "progress": _progress(rollout),
                **results,
            },
            turn,
        )

    return await while_connected(request, when_done())


@ROLLOUTS.delete("/rollouts/{id}", changes=True, raises=(NotFound,))
async def delete(service: Service, id: RolloutId, caller: Caller) -> RolloutStatus:
    """Abort the sequences of a rollout that still run, and forget it."""
    rollout = service.rollouts.find(id, caller)
    service.rollouts.delete(rollout)
    return RolloutStatus(rollout.header.id, "deleted")


def _progress(rollout: KeptRollout) -> Progress:
    items_ended, tokens = rollout.count()
    return Progress(len(rollout.item_ids), items_ended, tokens)
