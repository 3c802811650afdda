"""Limits on every body: its encoding, its size, its speed, and the total of all incomplete
bodies.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tlt_server.errors import (
    EncodedBody,
    InvalidRequest,
    RequestTimeout,
    TltError,
    TooLarge,
    Unavailable,
)
from tlt_server.frontend.http.auth import key_of

STALLED_S = 1.0
Refuse = Callable[[str, TltError], ASGIApp]  # (path, error) -> reply in the shape of the path
DISCARD_S = 1.0
RESTS = "rests"  # key in the scope's state: tells the port that only a discarded rest is to come


class BodyOnItsWay(Protocol):
    def cut(self, error: TltError) -> None:
        """End the wait for the rest of this body, which no longer counts."""


class _Held(NamedTuple):
    bytes: int
    since_s: float  # when the last of them came


class BodyBudget:
    def __init__(self, max_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._clock = max_bytes, clock
        # By owner; the body that has gone longest without a byte is first.
        self._held: dict[str, dict[BodyOnItsWay, _Held]] = {}
        self._sums: Counter[str] = Counter()  # bytes by owner

    @property
    def bytes(self) -> int:
        return self._sums.total()

    def take(self, owner: str, body: BodyOnItsWay, size: int) -> None:
        """Count received bytes, and cut bodies, perhaps this one, until all fit."""
        held = self._held.setdefault(owner, {})
        before = held.pop(body).bytes if body in held else 0
        held[body] = _Held(before + size, self._clock())
        self._sums[owner] += size
        while self.bytes > self._max_bytes:
            self._cut_first_of(
                self._sums.most_common(1)[0][0],
                f"bodies on their way hold {self._max_bytes} bytes, the limit (max_bodies_mb)",
            )

    def make_place(self, owner: str | None = None) -> bool:
        """Cut one body that has stalled: of this owner or, without one, of the owner with most.
        Return False if there is none.
        """
        owners = self._held.keys() if owner is None else self._held.keys() & {owner}
        if not owners:
            return False
        owner = max(owners, key=lambda owner: len(self._held[owner]))
        longest = next(iter(self._held[owner].values()))
        if self._clock() - longest.since_s < STALLED_S:
            return False
        self._cut_first_of(owner, "as many requests are in progress as may be (max_connections)")
        return True

    def release(self, owner: str, body: BodyOnItsWay) -> None:
        """Stop counting this body: it is complete or refused."""
        held = self._held.get(owner, {})
        if body in held:
            self._sums[owner] -= held.pop(body).bytes
        if not held:
            self._held.pop(owner, None)
            del self._sums[owner]

    def _cut_first_of(self, owner: str, why: str) -> None:
        body = next(iter(self._held[owner]))
        self.release(owner, body)
        body.cut(
            Unavailable(
                f"{why}, and this body was the slowest of the key that sends most: send it later, "
                "or fewer at once",
                retry_after_s=1,
            )
        )

    def check(self) -> None:
        sums = {
            owner: sum(one.bytes for one in held.values()) for owner, held in self._held.items()
        }
        assert self._sums == Counter(sums) and all(self._held.values())
        assert self.bytes <= self._max_bytes
        for held in self._held.values():
            times = [one.since_s for one in held.values()]
            assert times == sorted(times)


class Reading:
    """The waits for incomplete bodies. `close` ends every wait, now and later, with
    `Unavailable`.
    """

    def __init__(self) -> None:
        self.closed = False
        self._waits: set[asyncio.Timeout] = set()

    @contextlib.asynccontextmanager
    async def until(self, deadline: float) -> AsyncIterator[asyncio.Timeout]:
        """Bound a wait, in the loop's time; raise `TimeoutError` if it takes longer. The caller may
        end it earlier.
        """
        wait = asyncio.timeout_at(deadline if not self.closed else 0.0)
        self._waits.add(wait)
        try:
            async with wait:
                yield wait
        except TimeoutError:
            if self.closed:
                raise Unavailable(
                    "the server is shutting down and reads no more of the body; send the request "
                    "to another replica, or later",
                    retry_after_s=5,
                ) from None
            raise
        finally:
            self._waits.remove(wait)

    def close(self) -> None:
        self.closed = True
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(0.0)


class BodyLimits:
    """Middleware that refuses a body before it is complete: 413 if it is too large, 415 if it is
    encoded, 408 if it is too slow, 503 if all incomplete bodies together are too large. The reply
    is sent at once. Then a bounded part of the rest is discarded and the connection is closed.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body_bytes: int,
        body_timeout_s: float,
        budget: BodyBudget,
        reading: Reading,
        refuse: Refuse,
    ) -> None:
        self.app, self.reading, self.refuse = app, reading, refuse
        self.budget = budget
        self.max_body_bytes, self.body_timeout_s = max_body_bytes, body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(self, receive, key_of(scope), complete=not _has_body(scope))

        async def closing_send(message: Message) -> None:
            if body.complete:
                await send(message)
            elif message["type"] == "http.response.start":
                await send(
                    {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
                )
            elif message.get("more_body", False):
                await send(message)
            else:
                await send({**message, "more_body": True})
                scope.get("state", {}).get(RESTS, lambda: None)()
                body.release()  # a request that was refused has no place to lose
                await body.discard()
                await send({"type": "http.response.body"})

        try:
            _check_encoding(scope)
            declared = _content_length(scope)
            if declared > self.max_body_bytes:
                raise _too_large(f"{declared} bytes", self.max_body_bytes)
        except TltError as error:
            await self.refuse(scope["path"], error)(scope, body.receive, closing_send)
        else:
            try:
                body.count(0)  # from now on it may lose its place
                await self.app(scope, body.receive, closing_send)
            finally:
                body.release()


class _Body:
    """A request body as it arrives, counted and timed."""

    def __init__(self, limits: BodyLimits, receive: Receive, owner: str, *, complete: bool) -> None:
        self.complete, self._limits = complete, limits
        self._receive, self._owner, self._limit_bytes = receive, owner, limits.max_body_bytes
        self._deadline = asyncio.get_running_loop().time() + limits.body_timeout_s
        self._bytes = 0
        self._cut: TltError | None = None  # why it made room for others
        self._wait: asyncio.Timeout | None = None

    async def receive(self) -> Message:
        if self.complete:
            return await self._receive()
        try:
            async with self._limits.reading.until(self._deadline) as self._wait:
                message = await self._receive()
        except TimeoutError:
            self._check_cut()
            raise RequestTimeout(
                f"the body did not arrive within {self._limits.body_timeout_s:g} s "
                "(body_timeout_s); send it faster, or in smaller requests"
            ) from None
        finally:
            self._wait = None
        if message["type"] == "http.request":
            self.count(len(message.get("body", b"")), more=message.get("more_body", False))
        return message

    def count(self, size: int, *, more: bool = True) -> None:
        if self.complete:
            return
        self._bytes += size
        if self._bytes > self._limit_bytes:
            raise _too_large(f"more than {self._limit_bytes} bytes", self._limit_bytes)
        self._check_cut()
        if more:
            self._limits.budget.take(self._owner, self, size)
            self._check_cut()
        else:
            self.complete = True
            self.release()

    def cut(self, error: TltError) -> None:
        self._cut = error
        if self._wait is not None and not self._wait.expired():
            self._wait.reschedule(0.0)

    def _check_cut(self) -> None:
        if self._cut is not None:
            raise self._cut

    def release(self) -> None:
        self._limits.budget.release(self._owner, self)

    async def discard(self) -> None:
        """Discard the rest, for `DISCARD_S` and up to twice the limit in all.

        A connection that is closed with unread bytes is reset, and the reset may overtake the
        reply.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                while self._bytes <= 2 * self._limit_bytes:
                    message = await self._receive()
                    self._bytes += len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return


def _too_large(size: str, limit_bytes: int) -> TooLarge:
    return TooLarge(
        f"the body has {size}; the limit is {limit_bytes} bytes (max_body_mb): split the request"
    )


def _has_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope["headers"]
    )


def _check_encoding(scope: Scope) -> None:
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.lower() not in (b"", b"identity"):
            raise EncodedBody(
                f"Content-Encoding is {value[:40].decode('latin-1')!r}; send the body as it is "
                "(identity)"
            )


def _content_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length":
            if not value.isdigit() or len(value) > 18:
                raise InvalidRequest(
                    f"Content-Length is {value[:40]!r}; it must be a number of bytes"
                )
            return int(value)
    return 0
