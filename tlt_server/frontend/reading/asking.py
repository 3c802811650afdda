"""The current request as a job needs it: its key, its client's disconnection, and the reader.

The middleware `Asking` sets it for everything that a request runs. So a job in any room waits for
the turn of the request's key, and is dropped when the client has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextvars import ContextVar
from typing import Any, NamedTuple, Never, TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send

from tlt_server.errors import Cancelled
from tlt_server.frontend.reading.jobs import Patience, Slice
from tlt_server.frontend.reading.reader import Reader

T = TypeVar("T")


class Asker(NamedTuple):
    """The current request."""

    reader: Reader
    key: str  # name of the API key; empty without one
    receive: Receive


_ASKER: ContextVar[Asker] = ContextVar("asker")


class Asking:
    """Middleware that sets the current request."""

    def __init__(
        self, app: ASGIApp, *, reader: Callable[[], Reader], key_of: Callable[[Scope], str]
    ) -> None:
        self.app, self.reader, self.key_of = app, reader, key_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _ASKER.set(Asker(self.reader(), self.key_of(scope), receive))
        await self.app(scope, receive, send)


async def left(receive: Receive) -> Never:
    """Wait until the client has left; then raise `Cancelled`."""
    while (await receive())["type"] != "http.disconnect":
        pass
    raise Cancelled("the client disconnected")


async def ask(
    slices: Iterable[Slice], *, total: int, largest: int, patience: Patience | None = None
) -> list[Any]:
    """Return the value of each slice, from the reading process. The request's body must have been
    read. `Cancelled` if the client has left.
    """
    asker = _ASKER.get()
    work = asker.reader.ask(asker.key, slices, total=total, largest=largest, patience=patience)
    return await unless(left(asker.receive), work)


async def render(slice: Slice, size: int) -> Any:
    """Return the text of a request's own template. `Cancelled` if the client has left."""
    asker = _ASKER.get()
    return await unless(left(asker.receive), asker.reader.renderer.render(asker.key, slice, size))


async def unless(watch: Coroutine[Any, Any, Never], work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If `watch` raises first, cancel `work` and raise that error."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(watch)
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return (working if working.done() else watching).result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
