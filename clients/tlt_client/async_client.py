"""The asyncio client of the native dialect: the operations of `client.Client`, awaited."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

from tlt_client import calls, drafter_calls, flows
from tlt_client.calls import BatchFields, Items, StreamFields
from tlt_client.client import Operations
from tlt_client.drafter_calls import Of
from tlt_client.retries import NEVER, Retries
from tlt_client.tls import Tls
from tlt_client.transport import AsyncTransport, keyed
from tlt_client.wire import Reply, RolloutReply, StreamEvent


class AsyncRollout:
    """`Rollout` for asyncio."""

    def __init__(self, transport: AsyncTransport, id: str) -> None:
        self._transport, self.id = transport, id

    async def fetch(self, wait_s: float = 0.0) -> RolloutReply:
        return await self._transport.ask(calls.fetch(self.id, wait_s))

    async def result(self, timeout_s: float = 3600.0) -> Reply:
        return await self._transport.run(flows.result(self.id, timeout_s))

    async def delete(self) -> None:
        await self._transport.ask(calls.delete(self.id))


class AsyncClient(Operations):
    """Asyncio client, with the arguments and operations of `Client`."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        timeout_s: float | None = None,
        tls: Tls | None = None,
        retries: Retries = NEVER,
    ) -> None:
        self._transport = AsyncTransport(url, api_key, timeout_s, tls, retries)

    @overload
    async def generate(
        self, items: Items, *, detach: Literal[False] = False, **options: Unpack[BatchFields]
    ) -> Reply: ...

    @overload
    async def generate(
        self, items: Items, *, detach: Literal[True], **options: Unpack[BatchFields]
    ) -> AsyncRollout: ...

    async def generate(
        self, items: Items, *, detach: bool = False, **options: Unpack[BatchFields]
    ) -> Reply | AsyncRollout:
        options = keyed(options, self._transport.retries)
        if detach:
            id = await self._transport.ask(calls.detach(items, **options))
            return AsyncRollout(self._transport, id)
        return await self._transport.ask(calls.generate(items, **options))

    def stream(
        self, items: Items, **options: Unpack[StreamFields]
    ) -> AsyncGenerator[StreamEvent, None]:
        return self._transport.events(calls.stream(items, **options))

    def rollout(self, id: str) -> AsyncRollout:
        """Return a handle of an earlier rollout; sends nothing."""
        return AsyncRollout(self._transport, id)

    async def fetch_drafter(
        self, directory: str | PathLike[str], of: Of = "live"
    ) -> Mapping[str, Any]:
        flow = drafter_calls.fetch_drafter(directory, of, self._transport.retries)
        return await self._transport.run(flow)

    async def is_ready(self) -> bool:
        return await self._transport.run(flows.ready())

    async def close(self) -> None:
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
