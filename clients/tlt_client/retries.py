"""Retries of a call: exponential backoff with jitter, bounded in number and in length."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tlt_client.errors import (
    ConnectionFailed,
    InvalidArgument,
    NotReached,
    ServerError,
    TltClientError,
)

REFUSED = (408, 429, 503)  # nothing of the request was done, or only what may be done twice


@dataclass(frozen=True)
class Retries:
    """Rule for up to `times` more tries. The pause before try k is random between half and all of
    `first_s` x 2^k, at most `max_s` and at least the server's Retry-After; if Retry-After exceeds
    `max_s`, the error is raised instead.

    A call is sent again if it was refused or never arrived; after a broken connection, also if a
    second run has the same effect as the first (reads, weight pushes, batches with an idempotency
    key).
    """

    times: int = 4
    first_s: float = 0.5
    max_s: float = 30.0

    def __post_init__(self) -> None:
        if self.times < 0 or not 0 <= self.first_s <= self.max_s:
            raise InvalidArgument(
                f"times is {self.times}, first_s {self.first_s} and max_s {self.max_s}; "
                "none may be negative, nor first_s above max_s"
            )

    def pause_s(
        self,
        tried: int,
        error: TltClientError,
        *,
        repeatable: bool,
        drawn: Callable[[], float] = random.random,
    ) -> float | None:
        """Return the pause before the next try, after `tried` tries; None for no further try."""
        if tried > self.times or not _passes(error, repeatable):
            return None
        min_s = (error.retry_after_s or 0.0) if isinstance(error, ServerError) else 0.0
        if min_s > self.max_s:
            return None
        return max(min_s, min(self.max_s, self.first_s * 2 ** (tried - 1)) * (1 + drawn()) / 2)


NEVER = Retries(times=0)


def _passes(error: TltClientError, repeatable: bool) -> bool:
    """Return True if the same call may succeed later, without being executed twice."""
    if isinstance(error, ServerError):
        return error.retryable and (repeatable or error.status in REFUSED)
    return isinstance(error, NotReached) or (repeatable and isinstance(error, ConnectionFailed))
