"""JSON replies, and errors as `{"error": ...}` with Retry-After where it helps.

`error_reply` is the shape of the body; a borrowed dialect has its own (see `endpoints.Endpoint.error_shape`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import structlog
from msgspec import Meta, Struct
from starlette.responses import Response

from tlt_client.wire import WireError
from tlt_server.errors import TltError
from tlt_server.frontend.logs import frames

log = structlog.get_logger()


def json_response(content: Any, status: int = 200, *, retry_after_s: float | None = None) -> Response:
    """A reply that says that the same request may pass later (429, 503) always says when to try."""
    response = Response(msgspec.json.encode(content), status, media_type="application/json")
    if retry_after_s is not None or status in (429, 503):
        response.headers["retry-after"] = str(max(1, math.ceil(retry_after_s or 0)))
    return response


class Refusal(Struct, frozen=True):
    """The body of every reply that is an error."""

    error: Annotated[WireError, Meta(description="what went wrong")]


def error_body(error: TltError) -> WireError:
    return WireError(error.code, error.message, error.retryable)


def error_reply(error: TltError) -> Refusal:
    return Refusal(error_body(error))


def error_response(error: TltError, shape: Callable[[TltError], Any] = error_reply, *, close: bool = False) -> Response:
    response = json_response(shape(error), error.http_status, retry_after_s=error.retry_after_s)
    if error.http_status == 401:
        response.headers["www-authenticate"] = "Bearer"
    if close:
        response.headers["connection"] = "close"
    return response


def unexpected(error: Exception) -> TltError:
    """Log one of our own bugs and give the error to answer with. The exception's message is left out: it may quote a prompt."""
    log.error("unexpected_error", type=type(error).__name__, frames=frames(error))
    return TltError(f"unexpected {type(error).__name__} in the server; its log says where")
