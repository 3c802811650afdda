"""What can go wrong on the way to a result: one class for each error code of the server, and what
the connection can do.

TltClientError
├── ConnectionFailed ── NotReached
├── InvalidArgument
├── NotLive
└── ServerError ── InvalidRequest, Unauthenticated, Forbidden, NotFound, QueueFull, Unavailable, ...
"""

from __future__ import annotations

from typing import ClassVar


class TltClientError(Exception):
    """Base of this package's errors."""


class ConnectionFailed(TltClientError):
    """The server was not reached, or the connection broke before the reply was complete; nothing is
    known of the request.
    """


class NotReached(ConnectionFailed):
    """There was no connection, so the request was not sent."""


class InvalidArgument(TltClientError, ValueError):
    """What was given cannot be sent; nothing was."""


class NotLive(TltClientError):
    """A push was taken, and what it brought is not what the server generates with, though nobody
    asked for that by `commit=False`.
    """


class ServerError(TltClientError):
    """The server refused the request or could not finish it. Of a code that this client does not
    know it is the class itself.
    """

    of_code: ClassVar[str] = ""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        status: int,
        retryable: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.status = code, message, status
        self.retryable, self.retry_after_s = retryable, retry_after_s


class Internal(ServerError):
    """A bug of the server, whose log has the place."""

    of_code = "internal"


class InvalidRequest(ServerError):
    """The request's content is wrong; the message says what and how to correct it."""

    of_code = "invalid_request"


class TooLarge(InvalidRequest):
    """The body or the work asked for is over a limit."""

    of_code = "too_large"


class Unauthenticated(ServerError):
    """The request carried no key that the server knows."""

    of_code = "unauthenticated"


class Forbidden(ServerError):
    """Not with this key, not from there, or not to there."""

    of_code = "forbidden"


class NotFound(ServerError):
    """No such route, model, rollout or push, or not one of this key."""

    of_code = "not_found"


class MethodNotAllowed(ServerError):
    """The path takes other methods."""

    of_code = "method_not_allowed"


class Conflict(ServerError):
    """It does not fit what the server is doing or already holds."""

    of_code = "conflict"


class WeightsRefused(ServerError):
    """The pushed weights failed a check; what was live is live still."""

    of_code = "weights_refused"


class PushFailed(ServerError):
    """A push broke off and nothing has changed; the same push may be sent again."""

    of_code = "push_failed"


class ChannelBroken(ServerError):
    """A push broke off because its sender went away, fell silent or sent too little, or what it
    sent could not be kept; it must send again, not only ask again.
    """

    of_code = "channel_broken"


class QueueFull(ServerError):
    """The server's queue has no room for it now."""

    of_code = "queue_full"


class Overloaded(ServerError):
    """By forecast it would miss its time."""

    of_code = "overloaded"


class QueueTimeout(ServerError):
    """It was not begun within its queue_timeout_s."""

    of_code = "queue_timeout"


class UnsafeChannel(ServerError):
    """Weights in a form that is not read, because to read it is to run it."""

    of_code = "unsafe_channel"


class RequestTimeout(ServerError):
    """The body took too long to arrive."""

    of_code = "request_timeout"


class Cancelled(ServerError):
    """It was ended by somebody who may."""

    of_code = "cancelled"


class DeadlineExceeded(ServerError):
    """Its deadline (timeout_s) passed."""

    of_code = "deadline_exceeded"


class Unavailable(ServerError):
    """The server is starting, restarting, draining or paused."""

    of_code = "unavailable"


class EngineFailed(ServerError):
    """The engine died with this request, or the server left with this change of weights, which may
    be done or not.
    """

    of_code = "engine_failed"


class Poisoned(ServerError):
    """The engine died twice with it, so it is not run again."""

    of_code = "poisoned"


class StorageFailed(ServerError):
    """What must be kept cannot be."""

    of_code = "storage_failed"


class ModelError(ServerError):
    """A pushed directory has a missing, mis-shaped or truncated part."""

    of_code = "model"


def _tree(cls: type[ServerError]) -> list[type[ServerError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in _tree(sub))]


_BY_CODE = {cls.of_code: cls for cls in _tree(ServerError)}


def server_error(
    code: str,
    message: str,
    *,
    status: int,
    retryable: bool = False,
    retry_after_s: float | None = None,
) -> ServerError:
    """The error of the class that its code has."""
    return _BY_CODE.get(code, ServerError)(
        code, message, status=status, retryable=retryable, retry_after_s=retry_after_s
    )
