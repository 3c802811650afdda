"""The error tree. Every class has its HTTP status and gRPC code; every message names value, limit
and remedy.

User errors derive from `TltError` and cross process seams as `(code, message)`; anything else is
our own bug. `retryable` tells a client whether the same request may succeed later.
"""

from __future__ import annotations

from typing import ClassVar, Self


class TltError(Exception):
    """Base of all errors that a user of the server can see."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    grpc_code: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class InvalidRequest(TltError):
    """The request's content is wrong; sending it again will not help."""

    code, http_status, grpc_code = "invalid_request", 400, "INVALID_ARGUMENT"


class TooLarge(InvalidRequest):
    """The body or the requested work exceeds a limit."""

    code, http_status, grpc_code = "too_large", 413, "INVALID_ARGUMENT"


class ContextExceeded(InvalidRequest):
    """The prompt is longer than the model, or the server, takes."""

    @classmethod
    def of(cls, found: str, limit: str, max_prompt_tokens: int) -> Self:
        """Return the error with the wording that clients look for. `found`: the prompt's length.
        `limit`: the allowed length.
        """
        return cls(
            f"{found}; the limit is {limit}, as this model's maximum context length is "
            f"{max_prompt_tokens + 1} tokens here: shorten it"
        )


class EncodedBody(InvalidRequest):
    """The body is compressed; its size unpacked would have no bound."""

    http_status, grpc_code = 415, "UNIMPLEMENTED"


class WrongHttpVersion(InvalidRequest):
    """The request is not HTTP/1.0 or 1.1."""

    http_status, grpc_code = 505, "UNIMPLEMENTED"


class Unauthenticated(TltError):
    """The request carries no known API key."""

    code, http_status, grpc_code = "unauthenticated", 401, "UNAUTHENTICATED"


class Forbidden(TltError):
    """The request is not allowed: a key without the scope, a foreign Host or Origin, a path outside
    the weight root, a server that takes no weights.
    """

    code, http_status, grpc_code = "forbidden", 403, "PERMISSION_DENIED"


class NotFound(TltError):
    """A route, model or push does not exist."""

    code, http_status, grpc_code = "not_found", 404, "NOT_FOUND"


class MethodNotAllowed(TltError):
    """The path exists but only takes other methods, which the reply's Allow names."""

    code, http_status, grpc_code = "method_not_allowed", 405, "UNIMPLEMENTED"


class Conflict(TltError):
    """The request does not fit the server's activity or content: a push during a push, a version
    with other content.
    """

    code, http_status, grpc_code = "conflict", 409, "ABORTED"


class WeightsRefused(TltError):
    """The pushed weights failed a check; the weights from before are still live, bit for bit."""

    code, http_status, grpc_code = "weights_refused", 422, "FAILED_PRECONDITION"


class PushFailed(TltError):
    """A push broke off for a reason other than its weights; nothing has changed and the same push
    may be sent again.
    """

    code, http_status, grpc_code, retryable = "push_failed", 500, "INTERNAL", True


class ChannelBroken(TltError):
    """A push broke off because its sender disconnected, fell silent or sent too little, or its data
    could not be kept; it must send again, not only ask again.
    """

    code, http_status, grpc_code = "channel_broken", 424, "ABORTED"


class QueueFull(TltError):
    """The bounded queue has no room; the reply carries Retry-After."""

    code, http_status, grpc_code, retryable = "queue_full", 429, "RESOURCE_EXHAUSTED", True


class Overloaded(TltError):
    """The request is forecast to exceed its time because of open requests; the reply carries
    Retry-After.
    """

    code, http_status, grpc_code, retryable = "overloaded", 429, "RESOURCE_EXHAUSTED", True


class QueueTimeout(TltError):
    """The sequence did not start within its queue_timeout_s; nothing of it was computed."""

    code, http_status, grpc_code, retryable = "queue_timeout", 429, "RESOURCE_EXHAUSTED", True


class UnsafeChannel(TltError):
    """A form of weights that is not read because reading it runs code; the message names the safe
    ones.
    """

    code, http_status, grpc_code = "unsafe_channel", 415, "UNIMPLEMENTED"


class RequestTimeout(TltError):
    """The client took too long to send its request."""

    code, http_status, grpc_code, retryable = "request_timeout", 408, "DEADLINE_EXCEEDED", True


class Cancelled(TltError):
    """The client left or requested an abort."""

    code, http_status, grpc_code = "cancelled", 499, "CANCELLED"


class DeadlineExceeded(TltError):
    """The body took too long, or the request's deadline (timeout_s) passed before it finished."""

    code, http_status, grpc_code, retryable = "deadline_exceeded", 504, "DEADLINE_EXCEEDED", True


class Unavailable(TltError):
    """The server is not ready or is draining, or the engine is gone."""

    code, http_status, grpc_code, retryable = "unavailable", 503, "UNAVAILABLE", True


class EngineFailed(TltError):
    """The engine failed while this request was open; its pages are free and it may be sent again. A
    weight change may or may not have happened, even if the server left before it was answered.
    """

    code, http_status, grpc_code, retryable = "engine_failed", 500, "INTERNAL", True


class NotFinite(TltError):
    """The model's logits are not finite (NaN or overflow) after this request's tokens; other
    weights may serve it, a retry cannot.
    """

    code, http_status, grpc_code = "not_finite", 500, "INTERNAL"


class Poisoned(TltError):
    """The request was running when two engines crashed or were lost, and made no progress in
    between; it is not run again.
    """

    code, http_status, grpc_code = "poisoned", 422, "FAILED_PRECONDITION"


class StructureFailed(TltError):
    """A structured output cannot go on: no token of the model can follow, or its grammar ran into a
    limit on the way.
    """

    code, http_status, grpc_code = "structure_failed", 422, "FAILED_PRECONDITION"


class StorageFailed(TltError):
    """Data cannot be stored: the disk is full or broken, or a limit on stored data is reached."""

    code, http_status, grpc_code, retryable = "storage_failed", 507, "RESOURCE_EXHAUSTED", True


class StartupError(TltError):
    """The configuration or a model directory cannot be used; the process exits with status 2."""

    code, http_status, grpc_code = "startup", 500, "FAILED_PRECONDITION"


class ModelError(StartupError):
    """A model directory has a missing, mis-shaped or truncated part."""

    code = "model"


def _tree(cls: type[TltError]) -> list[type[TltError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in _tree(sub))]


def codes() -> list[str]:
    """Return the code of every error."""
    return list(dict.fromkeys(cls.code for cls in _tree(TltError)))


def from_code(code: str, message: str) -> TltError:
    """Rebuild an error that crossed a process seam as its code and message."""
    by_code = {cls.code: cls for cls in reversed(_tree(TltError))}
    return by_code.get(code, TltError)(message)
