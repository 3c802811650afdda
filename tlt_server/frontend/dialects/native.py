"""The native dialect: `POST /generate` with a batch of requests; a JSON reply, or server-sent events as items finish.

A JSON reply has one entry per item, in order of the request: a result or an error. When no item succeeded its status is the first
error's. Events: `token`, `result`, `error` (one per item), and a last `done`. A batch that is detached, or
has an Idempotency-Key, runs as a rollout.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from tlt_client.wire import Reply, RolloutStatus
from tlt_server.errors import InvalidRequest
from tlt_server.frontend.delivery import EventStream, reply, while_connected
from tlt_server.frontend.endpoints import Endpoint
from tlt_server.frontend.generation import Event, Generation, ItemError, ItemResult, Service, TokenEvent
from tlt_server.frontend.replies import error_body, json_response, unexpected
from tlt_server.frontend.requests import NativeRequest, parse, shown
from tlt_server.frontend.rollout import Rollout
from tlt_server.frontend.validation import Batch

MAX_KEY = 256


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, result: ItemResult) -> None:
        self.prompt_tokens += result.prompt_tokens
        self.cached_tokens += result.cached_tokens
        self.completion_tokens += sum(len(choice.token_ids) for choice in result.choices)


def routes(service: Service) -> list[Endpoint]:
    rollouts = service.rollouts

    async def generate(request: Request) -> Response:
        """Generate n choices for each prompt of a batch.

        All of the batch is admitted or nothing. The reply has one entry per item, in order: choices or an error. With `stream`,
        server-sent events: `token`, then `result` or `error` per item, and a last `done`. With `detach` the reply comes at once, with
        status 202 and the id of a rollout, which `GET /rollouts/{id}` follows. With the header Idempotency-Key the batch goes on when
        the client leaves, and the same request with the same key gets the same reply, never a second run.
        """
        key = _key(request)
        if not key:
            service.engine.check_available()
        body = await request.body()
        digest = hashlib.sha256(body).hexdigest() if key else ""
        rollout = rollouts.keyed(key, digest)
        if rollout is not None:
            return await _attached(request, rollout)
        service.engine.check_available()  # the body may have taken its time
        asked = parse(body)
        if asked.stream and (asked.detach or key):
            raise InvalidRequest(f"stream is true with {'detach' if asked.detach else 'an Idempotency-Key'}; a rollout is fetched, not "
                                 "streamed: leave one of the two out")
        assert service.engine.info is not None
        batch = await service.validator.batch(asked, service.engine.info)
        if asked.detach or key:  # while this batch was tokenised its twin may have begun
            rollout = rollouts.keyed(key, digest) or rollouts.begin(batch, key=key, digest=digest, detached=asked.detach)
            return await _attached(request, rollout)
        generation = service.start(batch)  # a batch that is not admitted is an HTTP error, not a stream
        if batch.stream:
            return EventStream(_frames(service, batch, generation), generation)
        return await reply(request, _collect(service, batch, generation), generation)

    async def _attached(request: Request, rollout: Rollout) -> Response:
        if rollout.header.detached:
            response = json_response(RolloutStatus(rollout.header.id, rollout.status), 202)
        else:
            response = await while_connected(request, _done(rollout))
        response.headers["x-rollout-id"] = rollout.header.id
        return response

    async def _done(rollout: Rollout) -> Response:
        await rollout.wait()
        return whole(service, await rollouts.results(rollout))

    return [Endpoint("POST", "/generate", generate, takes=NativeRequest, gives=Reply, others={202: RolloutStatus}, streams=True)]


def _key(request: Request) -> str:
    """The Idempotency-Key, empty without one."""
    key = request.headers.get("idempotency-key")
    if key is not None and not (re.fullmatch(r"[!-~]+", key) and len(key) <= MAX_KEY):
        raise InvalidRequest(f"the header Idempotency-Key is {shown(key)}; it must be 1 to {MAX_KEY} printable ASCII characters without "
                             "spaces, such as a UUID")
    return key or ""


def phrase(event: Event) -> tuple[str, dict[str, Any]]:
    match event:
        case TokenEvent(id, delta):
            return "token", {"id": id, **{name: value for name, value in msgspec.structs.asdict(delta).items() if value is not UNSET}}
        case ItemResult(id, choices):
            return "result", {"id": id, "choices": choices}
        case ItemError(id, error):
            return "error", {"id": id, "error": error_body(error)}


def told(service: Service, ended: Iterable[ItemResult | ItemError]) -> dict[str, Any]:
    """Results and what they took."""
    usage, results = Usage(), []
    for event in ended:
        if isinstance(event, ItemResult):
            usage.add(event)
        results.append(phrase(event)[1])
    return {"results": results, **_footer(service, usage)}


def whole(service: Service, ended: Sequence[ItemResult | ItemError]) -> Response:
    """The reply to a batch whose items have all ended."""
    errors = [event.error for event in ended if isinstance(event, ItemError)]
    return json_response(told(service, ended), errors[0].http_status if len(errors) == len(ended) else 200)


async def _collect(service: Service, batch: Batch, generation: Generation) -> Response:
    ended = {event.id: event async for event in generation.events() if not isinstance(event, TokenEvent)}
    return whole(service, [ended[item.id] for item in batch.items])


async def _frames(service: Service, batch: Batch, generation: Generation) -> AsyncIterator[bytes]:
    usage, waiting = Usage(), {item.id for item in batch.items}
    try:
        async for event in generation.events():
            if isinstance(event, ItemResult):
                usage.add(event)
            if not isinstance(event, TokenEvent):
                waiting.discard(event.id)
            yield _frame(*phrase(event))
    except Exception as error:  # our own bug, but the status line is long gone: say so in the stream
        for id in waiting:
            yield _frame(*phrase(ItemError(id, unexpected(error))))
    yield _frame("done", _footer(service, usage))


def _frame(name: str, data: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"


def _footer(service: Service, usage: Usage) -> dict[str, Any]:
    return {"usage": usage, "numerics": service.numerics}
