"""Outcomes that many routes share: errors, their envelopes, which are OpenAI's for paths below /v1
and vLLM's, and the reply to a push, a commit, an abort or a rollback of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from http import HTTPStatus
from typing import Annotated, Literal, cast

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
from tlt_server.wire.events import WeightReport
from tlt_server.wire.labels import label_of

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


PushState = Literal[
    "committed", "staged", "gathering", "unchanged", "aborted", "named", "rolled_back", "unloaded"
]


class PushReply(Struct, frozen=True):
    """The outcome of a push, a commit, an abort or a rollback."""

    state: Annotated[
        PushState,
        "the outcome; gathering: further calls bring the missing tensors; unchanged: the same "
        "push, or the version to be committed, was live before, or nothing was pushed",
    ]
    version: Annotated[str, "name of the version pushed"]
    role: Annotated[str, "what was pushed"]
    weight_version: Annotated[str, "the target's version that is live now"]
    checksums: Annotated[dict[str, str], "mix64 of the values of each tensor pushed, by name"]
    phases_s: Annotated[dict[str, float], "duration of the push, by phase, in seconds"]
    pause_ms: Annotated[float, "how long the commit kept the loop from stepping"]
    lagging: Annotated[
        dict[str, str],
        "of a fleet: replicas that have to catch up before they are used again, and why",
    ] = {}


def outcome(report: WeightReport, *, labelled: bool = False) -> PushReply:
    """Return the reply that describes the report of the engine. `labelled`: it calls versions by
    their labels.
    """
    called = label_of if labelled else str
    return PushReply(
        cast(PushState, report.result),
        called(report.version),
        report.role,
        called(report.state.target),
        report.checksums,
        report.phases,
        report.pause_ms,
        report.lagging,
    )
