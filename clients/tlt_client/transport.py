"""Transports send calls and run the steps of flows: `Transport` blocks, `AsyncTransport` awaits.

Each belongs to one client, which uses it for every operation; so does a rollout's handle. All
network access of the package except that of channels is here.
"""

from __future__ import annotations

import asyncio
import inspect
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import httpx

from tlt_client import flows
from tlt_client.arguments import bearer
from tlt_client.calls import BatchFields, Call
from tlt_client.errors import ConnectionFailed, InvalidArgument, TltClientError
from tlt_client.flows import Flow, Wait
from tlt_client.responses import connection_errors
from tlt_client.retries import Retries
from tlt_client.tls import Tls
from tlt_client.wire import Done, EventParser, StreamEvent

T = TypeVar("T")
P = ParamSpec("P")
Value = TypeVar("Value", covariant=True)
CONNECT_S = 10.0
TRUNCATED = "the stream ended before its last event"


def url_of(address: str) -> str:
    """Return the server's URL. It may contain a password, which no message quotes."""
    try:
        parsed = httpx.URL(address)
        if parsed.scheme in ("http", "https") and parsed.host:
            return address
    except (httpx.InvalidURL, TypeError):
        pass
    shown = address.rpartition("@")[2][:200] if isinstance(address, str) else type(address).__name__
    raise InvalidArgument(
        f"url is {shown!r}; it must begin with http:// or https:// and name a host, such as "
        "http://127.0.0.1:8000"
    )


def _options(
    url: str, api_key: str | None, timeout_s: float | None, tls: Tls | None
) -> dict[str, Any]:
    """Return the arguments of an `httpx` client."""
    return {
        "base_url": url_of(url),
        "headers": bearer(api_key),
        "timeout": httpx.Timeout(timeout_s, connect=CONNECT_S),
        "limits": httpx.Limits(max_connections=None),  # the server bounds open connections
        **({"verify": tls.context()} if tls is not None else {}),
    }


def keyed(options: BatchFields, retries: Retries) -> BatchFields:
    """Return a batch's options: with retries, each has an idempotency key, so that it runs once."""
    if retries.times and options.get("idempotency_key") is None:
        return {**options, "idempotency_key": str(uuid.uuid4())}
    return options


class Transport:
    """Sends calls over blocking connections."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        timeout_s: float | None,
        tls: Tls | None,
        retries: Retries,
    ) -> None:
        self._http = httpx.Client(**_options(url, api_key, timeout_s, tls))
        self.retries = retries

    def ask(self, call: Call[T]) -> T:
        """Return the value of a call, sent again according to `retries`."""
        return self.run(flows.tried(call, self.retries))

    def take(self, call: Callable[P, Call[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the value of the call that these arguments make."""
        return self.ask(call(*args, **kwargs))

    def events(self, call: Call[httpx.Response]) -> Generator[StreamEvent, None, None]:
        """Yield the events of a streamed reply, the last of which is `Done`. Closing the iterator
        aborts the running items.
        """
        parser, response = EventParser(), self.ask(call)
        try:
            with connection_errors():
                for line in response.iter_lines():
                    event = parser.feed(line)
                    if event is not None:
                        yield event
                    if isinstance(event, Done):
                        return
        finally:
            response.close()
        raise ConnectionFailed(TRUNCATED)

    def run(self, flow: Flow[T]) -> T:
        """Run the steps of a flow and return its value."""
        try:
            step = next(flow)
            while True:
                try:
                    value = self._take(step)
                except TltClientError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(value)
        except StopIteration as end:
            result: T = end.value
            return result

    def _take(self, step: Call[Any] | Wait) -> Any:
        if isinstance(step, Wait):
            time.sleep(step.seconds)
            return None
        with connection_errors():
            response = self._http.send(step.request(self._http), stream=step.streams)
            if step.streams and response.is_error:
                response.read()
        return step.read(response)

    def close(self) -> None:
        self._http.close()


class AsyncTransport:
    """Sends calls from an asyncio loop."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        timeout_s: float | None,
        tls: Tls | None,
        retries: Retries,
    ) -> None:
        self._http = httpx.AsyncClient(**_options(url, api_key, timeout_s, tls))
        self.retries = retries

    async def ask(self, call: Call[T]) -> T:
        """Return the value of a call, sent again according to `retries`."""
        return await self.run(flows.tried(call, self.retries))

    async def take(self, call: Callable[P, Call[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the value of the call that these arguments make."""
        return await self.ask(call(*args, **kwargs))

    async def events(self, call: Call[httpx.Response]) -> AsyncGenerator[StreamEvent, None]:
        """Yield the events of a streamed reply, the last of which is `Done`. Closing the iterator
        aborts the running items.
        """
        parser, response = EventParser(), await self.ask(call)
        try:
            with connection_errors():
                async for line in response.aiter_lines():
                    event = parser.feed(line)
                    if event is not None:
                        yield event
                    if isinstance(event, Done):
                        return
        finally:
            await response.aclose()
        raise ConnectionFailed(TRUNCATED)

    async def run(self, flow: Flow[T]) -> T:
        """Run the steps of a flow and return its value."""
        try:
            step = next(flow)
            while True:
                try:
                    value = await self._take(step)
                except TltClientError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(value)
        except StopIteration as end:
            result: T = end.value
            return result

    async def _take(self, step: Call[Any] | Wait) -> Any:
        if isinstance(step, Wait):
            await asyncio.sleep(step.seconds)
            return None
        with connection_errors():
            response = await self._http.send(step.request(self._http), stream=step.streams)
            if step.streams and response.is_error:
                await response.aread()
        return step.read(response)

    async def close(self) -> None:
        await self._http.aclose()


class _Blocking(Protocol):
    _transport: Transport


class _Awaited(Protocol):
    _transport: AsyncTransport


class Method(Protocol[P, Value]):
    """The types of an operation: `Client` returns its value, `AsyncClient` awaits it."""

    @overload
    def __get__(self, client: _Blocking, kind: object) -> Callable[P, Value]: ...

    @overload
    def __get__(
        self, client: _Awaited, kind: object
    ) -> Callable[P, Coroutine[Any, Any, Value]]: ...


def operation(call: Callable[P, Call[T]]) -> Method[P, T]:
    """Return an operation as a method of a client, with its arguments and docstring."""

    def method(self: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        return self._transport.take(call, *args, **kwargs)

    found = inspect.signature(call)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    returned = str(found.return_annotation).removeprefix("Call[").removesuffix("]")
    method.__name__, method.__doc__ = call.__name__, call.__doc__
    described: Any = method
    described.__signature__ = found.replace(
        parameters=[own, *found.parameters.values()], return_annotation=returned
    )
    return described  # type: ignore[no-any-return]
