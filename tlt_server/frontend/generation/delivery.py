"""Delivery of a generation to its client: as one reply or as server-sent events. The end of the
response, for any reason, ends the generation.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import closing
from typing import Any, NamedTuple

import msgspec
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tlt_server.errors import TltError
from tlt_server.frontend.generation.generation import Generation
from tlt_server.frontend.http.replies import TAKE_CONTENT, TakeContent, in_turns, unexpected
from tlt_server.frontend.http.slices import Turn, json_slices
from tlt_server.frontend.reading.asking import left, unless

EVENT_END = b"\n\n"
DONE = b"data: [DONE]\n\n"


def event_frame(data: Any, name: str = "") -> bytes:
    """Return a small server-sent event."""
    return _head(name) + msgspec.json.encode(data) + EVENT_END


class LargeEvent(NamedTuple):
    """A server-sent event that may be large, so that it is encoded in slices."""

    data: Any
    turn: Turn
    name: str = ""

    def frame(self) -> AsyncIterator[bytes]:
        slices = json_slices(self.data, head=_head(self.name), tail=EVENT_END)
        return in_turns(slices, self.turn)


def _head(name: str) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " if name else b"data: "


class EventStream(StreamingResponse):
    """A reply of server-sent events: frames of small events, and large events."""

    def __init__(
        self,
        events: AsyncIterator[bytes | LargeEvent],
        generation: Generation,
        failed: Callable[[TltError], Iterable[bytes]],
        end: bytes = DONE,
    ) -> None:
        """`failed`: returns the frames that show an error which ended `events`, as the status is
        already sent. `end`: is sent last in any case.
        """
        super().__init__(
            self._frames(_ending(events, failed, end)),
            media_type="text/event-stream",
            headers={"cache-control": "no-store"},
        )
        self._generation = generation
        self._take: TakeContent | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._take = scope.get("state", {}).get(TAKE_CONTENT)
        with closing(self._generation):
            await super().__call__(scope, receive, send)
        await self._generation.release()

    async def _frames(self, events: AsyncIterator[bytes | LargeEvent]) -> AsyncIterator[bytes]:
        async for event in events:
            if isinstance(event, bytes):
                yield event
            elif self._take is not None:
                await self._take(event.data, event.turn, event.name)
            else:
                async for part in event.frame():
                    yield part


async def _ending(
    events: AsyncIterator[bytes | LargeEvent],
    failed: Callable[[TltError], Iterable[bytes]],
    end: bytes,
) -> AsyncIterator[bytes | LargeEvent]:
    error: TltError | None = None
    try:
        async for event in events:
            yield event
    except TltError as refused:
        error = refused
    except Exception as bug:
        error = unexpected(bug)
    for frame in () if error is None else failed(error):
        yield frame
    if end:
        yield end


async def reply(
    request: Request, work: Coroutine[Any, Any, Response], generation: Generation
) -> Response:
    """Run `work`, but cancel it (which aborts its sequences) as soon as the client hangs up."""
    try:
        with closing(generation):
            response = await while_connected(request, work)
    except TltError:
        await generation.release()
        raise
    response.background = BackgroundTask(generation.release)
    return response


async def while_connected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    return await unless(left(request.receive), work)
