"""Errors that many routes raise, and error envelopes: OpenAI's, for paths below /v1, and vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Collection
from http import HTTPStatus
from typing import Annotated

from msgspec import Struct

from tlt_server.errors import (
    ChannelBroken,
    Conflict,
    ContextExceeded,
    DeadlineExceeded,
    EngineFailed,
    NotFinite,
    NotFound,
    Overloaded,
    Poisoned,
    PushFailed,
    QueueFull,
    QueueTimeout,
    StructureFailed,
    TltError,
    Unavailable,
    WeightsRefused,
)

UNFINISHED = (  # a request is not admitted, or does not end with a result
    QueueFull,
    Overloaded,
    QueueTimeout,
    DeadlineExceeded,
    EngineFailed,
    NotFinite,
    Poisoned,
    StructureFailed,
    Unavailable,
)
PUSHED = (NotFound, Conflict, WeightsRefused, PushFailed)  # weights are not made live
JOINED = (Conflict, WeightsRefused, ChannelBroken)  # a process group is not joined
RECEIVED = (ChannelBroken, *PUSHED)
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class Problem(Struct, frozen=True):
    message: Annotated[str, "the value, the limit and the remedy"]
    type: Annotated[str, "the kind of error as this API names it"]
    param: Annotated[
        str | None, "the field of the request that it is about; null where it is about none"
    ]
    code: Annotated[
        str, "the kind of error as the native dialect names it, or context_length_exceeded"
    ]


class Failure(Struct, frozen=True):
    """The error envelope."""

    error: Annotated[Problem, "what went wrong"]


def failure_naming(fields: Collection[str]) -> Callable[[TltError], Failure]:
    """Return the function that puts an error into the envelope. A refusal's message begins with the
    wrong field, which is reported if it is one of `fields`.
    """

    def failure(error: TltError) -> Failure:
        word = error.message.split(" ")[0].split("[")[0].split(".")[0].rstrip(":")
        other = "invalid_request_error" if error.http_status < 500 else "server_error"
        return Failure(
            Problem(
                error.message,
                TYPES.get(error.http_status, other),
                word if error.http_status < 500 and word in fields else None,
                "context_length_exceeded" if isinstance(error, ContextExceeded) else error.code,
            )
        )

    return failure


class Fault(Struct, frozen=True):
    message: Annotated[str, "the value, the limit and the remedy"]
    type: Annotated[str, "the status in words"]
    param: Annotated[None, "always null"]
    code: Annotated[int, "the status"]


class Faulty(Struct, frozen=True):
    """The error envelope."""

    error: Annotated[Fault, "what went wrong"]


def fault(error: TltError) -> Faulty:
    """Return the error in vLLM's envelope."""
    known = error.http_status in {status.value for status in HTTPStatus}
    return Faulty(
        Fault(
            error.message,
            HTTPStatus(error.http_status).phrase if known else "Client Closed Request",
            None,
            error.http_status,
        )
    )
