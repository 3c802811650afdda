"""Errors of the client: one class for each error code of the server, and those of the connection.

TltClientError
├── ConnectionFailed ── NotReached
├── InvalidArgument
├── NotLive
└── ServerError ── InvalidRequest, Unauthenticated, Forbidden, NotFound, QueueFull, Unavailable, ...
"""

from __future__ import annotations

import re
from typing import ClassVar


class TltClientError(Exception):
    """Base of this package's errors."""


class ConnectionFailed(TltClientError):
    """The server was not reached, or the connection broke before the reply was complete; nothing is
    known of the request.
    """


class NotReached(ConnectionFailed):
    """No connection was made, so the request was not sent."""


class InvalidArgument(TltClientError, ValueError):
    """An argument that cannot be sent; nothing was sent."""


class NotLive(TltClientError):
    """The server accepted a push but does not generate with it, although the caller did not ask for
    `commit=False`.
    """


class ServerError(TltClientError):
    """The server refused the request or could not finish it. Unknown error codes have this class
    itself; a subclass is named after its code.
    """

    of_code: ClassVar[str] = ""

    def __init_subclass__(cls, code: str = "") -> None:
        cls.of_code = code or re.sub(r"(?<=.)(?=[A-Z])", "_", cls.__name__).lower()

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
    """A bug of the server; the server's log has the traceback."""


class InvalidRequest(ServerError):
    """The request's content is wrong; the message says what and how to correct it."""


class TooLarge(InvalidRequest):
    """The body or the requested work exceeds a limit."""


class Unauthenticated(ServerError):
    """The request carried no key that the server knows."""


class Forbidden(ServerError):
    """The key, the origin or the place in the file system is not allowed."""


class NotFound(ServerError):
    """No such route, model, rollout or push, or not one of this key's."""


class MethodNotAllowed(ServerError):
    """The path takes other methods."""


class Conflict(ServerError):
    """The request does not fit the server's activity or content."""


class WeightsRefused(ServerError):
    """The pushed weights failed a check; the live weights have not changed."""


class PushFailed(ServerError):
    """A push broke off and nothing has changed; the same push may be sent again."""


class ChannelBroken(ServerError):
    """A push broke off: its sender disconnected, fell silent or sent too little, or the server
    could not keep the bytes. The sender must send them again; a repeated request alone does not
    help.
    """


class QueueFull(ServerError):
    """The server's queue has no room for the request now."""


class Overloaded(ServerError):
    """The server forecasts that the request would miss its deadline."""


class QueueTimeout(ServerError):
    """The request did not start within its queue_timeout_s."""


class UnsafeChannel(ServerError):
    """Weights in a form that the server does not read, because reading it runs code."""


class RequestTimeout(ServerError):
    """The body took too long to arrive."""


class Cancelled(ServerError):
    """An authorized caller ended the request."""


class DeadlineExceeded(ServerError):
    """The request's deadline (timeout_s) passed."""


class Unavailable(ServerError):
    """The server is starting, restarting, draining or paused."""


class EngineFailed(ServerError):
    """The engine died with this request, or the server stopped during this weight change, which may
    or may not have happened.
    """


class NotFinite(ServerError):
    """The model's logits are not finite after this request's tokens; push valid weights."""


class Poisoned(ServerError):
    """The engine died twice with this request, so it is not run again."""


class StructureFailed(ServerError):
    """A structured output cannot continue; a simpler structure can."""


class StorageFailed(ServerError):
    """The server cannot store required data."""


class ModelError(ServerError, code="model"):
    """A pushed directory has a missing, mis-shaped or truncated part."""


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
    """Return an error with the class of its code."""
    return _BY_CODE.get(code, ServerError)(
        code, message, status=status, retryable=retryable, retry_after_s=retry_after_s
    )
