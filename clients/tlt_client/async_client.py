"""The asyncio client of the native dialect: the operations of `client.Client`, awaited."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

from tlt_client import calls, drafter_calls, flows, weight_calls
from tlt_client.calls import BatchFields, Items, StreamFields
from tlt_client.drafter_calls import Of
from tlt_client.retries import NEVER, Retries
from tlt_client.rollouts import AsyncRollout
from tlt_client.tls import Tls
from tlt_client.transport import AsyncTransport, awaited, keyed
from tlt_client.wire import Reply, StreamEvent


class AsyncClient:
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
        """Return a handle of a rollout that was started before; nothing is sent."""
        return AsyncRollout(self._transport, id)

    rollouts = awaited(calls.rollouts)
    server_info = awaited(calls.server_info)
    metrics = awaited(calls.metrics)
    load = awaited(calls.load)
    strategy = awaited(calls.strategy)
    set_strategy = awaited(calls.set_strategy)
    pause = awaited(calls.pause)
    resume = awaited(calls.resume)
    abort = awaited(calls.abort)
    sleep = awaited(calls.sleep)
    wake = awaited(calls.wake)
    clear_cache = awaited(calls.clear_cache)

    update_weights = awaited(weight_calls.update_weights)
    push_weights = awaited(weight_calls.push_weights)
    put_weights = awaited(weight_calls.put_weights)
    weights_part = awaited(weight_calls.weights_part)
    join_group = awaited(weight_calls.join_group)
    leave_group = awaited(weight_calls.leave_group)
    commit_weights = awaited(weight_calls.commit_weights)
    abort_weights = awaited(weight_calls.abort_weights)
    roll_back_weights = awaited(weight_calls.roll_back_weights)
    weights = awaited(weight_calls.weights)
    unload_adapter = awaited(weight_calls.unload_adapter)
    weight_checksums = awaited(weight_calls.weight_checksums)
    remember_weight_checksums = awaited(weight_calls.remember_weight_checksums)
    compare_weights = awaited(weight_calls.compare_weights)

    drafter = awaited(drafter_calls.drafter)
    train_drafter = awaited(drafter_calls.train_drafter)
    pause_drafter_training = awaited(drafter_calls.pause_drafter_training)
    resume_drafter_training = awaited(drafter_calls.resume_drafter_training)
    rollback_drafter = awaited(drafter_calls.rollback_drafter)
    export_drafter = awaited(drafter_calls.export_drafter)
    drafter_samples = awaited(drafter_calls.drafter_samples)
    add_drafter_samples = awaited(drafter_calls.add_drafter_samples)
    drafter_files = awaited(drafter_calls.drafter_files)
    drafter_file = awaited(drafter_calls.drafter_file)

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
