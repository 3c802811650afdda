"""Responses of the server as wire objects or as errors, and names in a request's path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from tlt_client.errors import ConnectionFailed, NotReached, server_error
from tlt_client.wire import Reply, WireError

T = TypeVar("T")
_REPLY = msgspec.json.Decoder(Reply)


# The code of an error in vLLM's envelope, which names none, by its status.
_CODES = {
    400: "invalid_request",
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    409: "conflict",
    413: "too_large",
    424: "channel_broken",
    503: "unavailable",
    504: "deadline_exceeded",
    507: "storage_failed",
}
_MAY_SUCCEED = (408, 429, 503, 504, 507)  # the same request, later


class _Refusal(msgspec.Struct):
    error: WireError


class _Message(msgspec.Struct):
    message: str


class _Fault(msgspec.Struct):
    error: _Message


def succeeded(response: httpx.Response) -> httpx.Response:
    """Return the response, or raise its `ServerError`."""
    if not response.is_error:
        return response
    wait = response.headers.get("retry-after", "")
    retry_after_s = float(wait) if wait.isdigit() else None
    try:
        error = msgspec.json.decode(response.content, type=_Refusal).error
    except msgspec.MsgspecError:
        error = _without_code(response)
    raise server_error(
        error.code,
        error.message,
        status=response.status_code,
        retryable=error.retryable,
        retry_after_s=retry_after_s,
    )


def _without_code(response: httpx.Response) -> WireError:
    """Return the error for a body that does not have a native form."""
    status, retryable = response.status_code, response.status_code in _MAY_SUCCEED
    try:
        message = msgspec.json.decode(response.content, type=_Fault).error.message
    except msgspec.MsgspecError:
        return WireError("unknown", response.text[:500], retryable)
    return WireError(_CODES.get(status, "unknown"), message, retryable)


def whole_reply(response: httpx.Response) -> Reply:
    """Return the reply. If every item failed, it has an error status and is still a reply."""
    if response.is_error:
        try:
            return _REPLY.decode(response.content)
        except msgspec.MsgspecError:
            pass
    return _REPLY.decode(succeeded(response).content)


def read_as(type: type[T]) -> Callable[[httpx.Response], T]:
    decoder = msgspec.json.Decoder(type)
    return lambda response: decoder.decode(succeeded(response).content)


json_object: Callable[[httpx.Response], Mapping[str, Any]] = read_as(dict[str, Any])


def in_path(name: str) -> str:
    """Return the name as one segment of a path, quoted if necessary."""
    return quote(name, safe="")


@contextmanager
def connection_errors() -> Iterator[None]:
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
        raise NotReached(f"{type(error).__name__}: {error}") from error
    except httpx.TransportError as error:
        raise ConnectionFailed(f"{type(error).__name__}: {error}") from error
