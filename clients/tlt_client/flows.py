"""Operations of several calls: tries until one succeeds, polls until a rollout is done. This module
does no I/O either.

A flow is a generator of steps. A step is a `Call` to send, whose value or error the flow receives,
or a `Wait`. `Transport` runs it blocking, `AsyncTransport` in a loop.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

from tlt_client import calls
from tlt_client.calls import Call
from tlt_client.errors import ConnectionFailed, ServerError, TltClientError
from tlt_client.retries import Retries
from tlt_client.wire import Reply

MAX_POLL_S = 20.0
AGAIN_S = 0.5  # while a server restarts

T = TypeVar("T")


class Wait(NamedTuple):
    seconds: float


Flow = Generator[Call[Any] | Wait, Any, T]


def tried(call: Call[T], retries: Retries) -> Flow[T]:
    """Return the value of a call, sent again according to `retries`."""
    for count in itertools.count(1):
        try:
            value: T = yield call
            return value
        except TltClientError as error:
            pause_s = retries.pause_s(count, error, repeatable=call.repeatable)
            if pause_s is None:
                raise
        yield Wait(pause_s)
    raise AssertionError("unreachable")


def ready() -> Flow[bool]:
    """Return True if the server is ready; False without a connection."""
    try:
        value: bool = yield calls.ready()
        return value
    except ConnectionFailed:
        return False


def result(id: str, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> Flow[Reply]:
    """Return a rollout's whole reply, waiting even while the server restarts. Raise `TimeoutError`
    when time is up; the rollout continues.
    """
    give_up_s = clock() + timeout_s
    while True:
        left_s = give_up_s - clock()
        try:
            found = yield calls.fetch(id, max(0.0, min(left_s, MAX_POLL_S)))
        except (ConnectionFailed, ServerError) as error:
            if left_s <= 0 or (isinstance(error, ServerError) and not error.retryable):
                raise
            yield Wait(AGAIN_S)
        else:
            if found.status == "done":
                return Reply(found.results, found.usage, found.numerics)
        if left_s <= 0:
            raise TimeoutError(
                f"the rollout {id} is not done after {timeout_s:g} s; it continues: ask again, or "
                "delete it"
            )
