"""JSON replies, and errors as `{"error": ...}`, with Retry-After if sending again helps.

`error_reply` is the native shape of an error; a borrowed dialect has its own, which its routes name
as `error_shape`.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import chain
from typing import Annotated, Any, Literal, Protocol

import msgspec
import structlog
from msgspec import Struct
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tlt_client.wire import WireError
from tlt_server.errors import TltError
from tlt_server.frontend.http.logs import frames
from tlt_server.frontend.http.slices import SLICE_BYTES, Turn, emptied, json_slices, members

log = structlog.get_logger()


REFUSED = "refused"  # key in the scope's state: the error of the reply

# Key in the scope's state: the function by which a transport with its own encoding takes a large
# content, or a large event and its name, in place of JSON.
TAKE_CONTENT = "take_content"


class TakeContent(Protocol):
    async def __call__(self, content: Any, turn: Turn, name: str = "") -> None: ...


def json_response(
    content: Any, status: int = 200, *, retry_after_s: float | None = None
) -> Response:
    response = Response(msgspec.json.encode(content), status, media_type="application/json")
    _say_when(response, retry_after_s)
    return response


def sliced_response(content: Any, turn: Turn) -> Response:
    """Return a reply that may be large. It is encoded in slices while it is sent, each slice after
    its turn, and its lists are then emptied. `content` may contain iterators, as `json_slices`
    allows.
    """
    slices = json_slices(content)
    first, second = next(slices), next(slices, None)
    if second is None:
        return Response(first, media_type="application/json")
    return SlicedResponse(content, chain((first, second), slices), turn)


class SlicedResponse(StreamingResponse):
    def __init__(self, content: Any, slices: Iterator[bytes], turn: Turn) -> None:
        super().__init__(in_turns(slices, turn), media_type="application/json")
        self._content, self._turn = content, turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        take: TakeContent | None = scope.get("state", {}).get(TAKE_CONTENT)
        if take is None:
            await super().__call__(scope, receive, send)
        else:
            await take(self._content, self._turn)
            headers = self.raw_headers
            status = self.status_code
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            if self.background is not None:
                await self.background()
        if isinstance(self._content, list):
            await emptied(self._content, self._turn)
            return
        for _, member in members(self._content):
            if isinstance(member, list):
                await emptied(member, self._turn)


async def in_turns(slices: Iterator[bytes], turn: Turn) -> AsyncIterator[bytes]:
    """Yield the slices of `json_slices`, each after a turn but the first."""
    for each in slices:
        yield each
        if len(each) >= SLICE_BYTES:  # else it was the last
            await turn(len(each))


def _say_when(response: Response, retry_after_s: float | None) -> None:
    """Add Retry-After to a reply (429, 503) after which the same request may succeed."""
    if retry_after_s is not None or response.status_code in (429, 503):
        response.headers["retry-after"] = str(max(1, math.ceil(retry_after_s or 0)))


class Status(Struct, frozen=True):
    status: Annotated[Literal["ok"], "the answer is yes; a no is an error"] = "ok"


class Refusal(Struct, frozen=True):
    """The body of every reply that is an error."""

    error: Annotated[WireError, "what went wrong"]


def error_body(error: TltError) -> WireError:
    return WireError(error.code, error.message, error.retryable)


def error_reply(error: TltError) -> Refusal:
    return Refusal(error_body(error))


class ErrorResponse(Response):
    """An error in the shape of its route. The scope's state keeps the error itself, for a transport
    with its own form of errors.
    """

    def __init__(
        self,
        error: TltError,
        shape: Callable[[TltError], Any] = error_reply,
        *,
        close: bool = False,
    ) -> None:
        super().__init__(
            msgspec.json.encode(shape(error)), error.http_status, media_type="application/json"
        )
        # The scope keeps the error, and the frames of its traceback keep scope and body: a cycle,
        # which would hold the body until the next garbage collection.
        error.__traceback__ = error.__context__ = None
        self._error = error
        _say_when(self, error.retry_after_s)
        if error.http_status == 401:
            self.headers["www-authenticate"] = "Bearer"
        if close:
            self.headers["connection"] = "close"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})[REFUSED] = self._error
        await super().__call__(scope, receive, send)


def unexpected(error: Exception) -> TltError:
    """Log a bug of ours and return the error to answer with. The exception's message is left out,
    since it may quote a prompt.
    """
    log.error("unexpected_error", type=type(error).__name__, frames=frames(error))
    return TltError(f"unexpected {type(error).__name__} in the server; its log shows where")
