"""The trace of a request: a span for all of it, and under it one for each of its parts.

A part is recorded once it has ended. `Access` begins the trace, `CURRENT` carries it to what the
request starts. Spans hold numbers, routes and versions, never a prompt, a completion or a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Protocol

Value = str | int | float
Headers = Iterable[tuple[bytes, bytes]]


class RequestTrace(Protocol):
    def part(self, name: str, start_s: float, end_s: float, **attributes: Value) -> None:
        """Record a part that lasted from `start_s` to `end_s`, by the monotonic clock."""

    def end(self, *, failed: bool, **attributes: Value) -> None:
        """End the span of the request."""


class Untraced:
    def part(self, name: str, start_s: float, end_s: float, **attributes: Value) -> None: ...

    def end(self, *, failed: bool, **attributes: Value) -> None: ...


Begin = Callable[[Headers], RequestTrace]  # a trace from a request's headers
UNTRACED = Untraced()
CURRENT: ContextVar[RequestTrace] = ContextVar("trace", default=UNTRACED)


def untraced(headers: Headers) -> RequestTrace:
    return UNTRACED
