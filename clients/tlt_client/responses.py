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


class _Refusal(msgspec.Struct):
    error: WireError


def succeeded(response: httpx.Response) -> httpx.Response:
    """Return the response, or raise the `ServerError` that it carries."""
    if not response.is_error:
        return response
    wait = response.headers.get("retry-after", "")
    retry_after_s = float(wait) if wait.isdigit() else None
    try:
        error = msgspec.json.decode(response.content, type=_Refusal).error
    except msgspec.MsgspecError:
        error = WireError(
            "unknown", response.text[:500], retryable=response.status_code in (429, 503)
        )
    raise server_error(
        error.code,
        error.message,
        status=response.status_code,
        retryable=error.retryable,
        retry_after_s=retry_after_s,
    )


def whole_reply(response: httpx.Response) -> Reply:
    """Return the reply. One in which every item failed has an error status and is still a reply."""
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
    """Return the name as one segment of a path, quoted where it must be."""
    return quote(name, safe="")


@contextmanager
def connection_errors() -> Iterator[None]:
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
        raise NotReached(f"{type(error).__name__}: {error}") from error
    except httpx.TransportError as error:
        raise ConnectionFailed(f"{type(error).__name__}: {error}") from error
