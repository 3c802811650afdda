"""What can go wrong on the way to a result. `ServerError` carries the server's code, message and HTTP status."""

from __future__ import annotations


class TltClientError(Exception):
    """Base of this package's errors."""


class ConnectionFailed(TltClientError):
    """The server was not reached, or the connection broke before the reply was complete; nothing is known of the request."""


class ServerError(TltClientError):
    """The server refused the request or could not finish it."""

    def __init__(self, code: str, message: str, *, status: int, retryable: bool = False, retry_after_s: float | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.status = code, message, status
        self.retryable, self.retry_after_s = retryable, retry_after_s
