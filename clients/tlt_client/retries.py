"""When a call is sent again, and how long after: exponential backoff with jitter, bounded in number
and in length.
"""

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

REFUSED = (408, 429, 503)  # with these nothing of the request was done, or what may be done twice


@dataclass(frozen=True)
class Retries:
    """`times` more tries at most. The pause before try k is drawn between half and all of `first_s`
    x 2^k, `longest_s` at most, and not shorter than the server's Retry-After; where that asks for
    more than `longest_s`, the error is raised instead.

    Sent again is what was refused or never arrived; and, where a second run of it is no different
    from the first (reads, weight pushes, batches with an idempotency key), also what broke off.
    """

    times: int = 4
    first_s: float = 0.5
    longest_s: float = 30.0

    def __post_init__(self) -> None:
        if self.times < 0 or not 0 <= self.first_s <= self.longest_s:
            raise InvalidArgument(
                f"times is {self.times}, first_s {self.first_s} and longest_s {self.longest_s}; none may be negative, "
                "nor first_s above longest_s"
            )

    def pause_s(
        self,
        tried: int,
        error: TltClientError,
        *,
        repeatable: bool,
        drawn: Callable[[], float] = random.random,
    ) -> float | None:
        """Before the next try, after `tried` of them; None where there is none."""
        if tried > self.times or not _passes(error, repeatable):
            return None
        least_s = (error.retry_after_s or 0.0) if isinstance(error, ServerError) else 0.0
        if least_s > self.longest_s:
            return None
        return max(
            least_s, min(self.longest_s, self.first_s * 2 ** (tried - 1)) * (1 + drawn()) / 2
        )


NEVER = Retries(times=0)


def _passes(error: TltClientError, repeatable: bool) -> bool:
    """Whether the same call may succeed later, without being done twice."""
    if isinstance(error, ServerError):
        return error.retryable and (repeatable or error.status in REFUSED)
    return isinstance(error, NotReached) or (repeatable and isinstance(error, ConnectionFailed))
