"""Handles of rollouts: batches that go on without their client, made by `generate(...,
detach=True)` or from an id.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol, TypeVar

from tlt_client import calls, flows
from tlt_client.flows import Flow
from tlt_client.retries import Retries
from tlt_client.wire import Reply, RolloutReply

T = TypeVar("T")


class Runs(Protocol):
    """`Client`, to its handles."""

    @property
    def retries(self) -> Retries: ...
    def run(self, flow: Flow[T]) -> T: ...


class RunsAsync(Protocol):
    """`AsyncClient`, to its handles."""

    @property
    def retries(self) -> Retries: ...
    def run(self, flow: Flow[T]) -> Awaitable[T]: ...


class Rollout:
    """A batch on its way: it goes on whatever becomes of this client. Results are kept for a while
    after its end (`rollout_ttl_s`).
    """

    def __init__(self, client: Runs, id: str) -> None:
        self._client, self.id = client, id

    def fetch(self, wait_s: float = 0.0) -> RolloutReply:
        """What has ended so far; with `wait_s` (at most 60), once all has ended or that time is up."""
        return self._client.run(flows.tried(calls.fetch(self.id, wait_s), self._client.retries))

    def result(self, timeout_s: float = 3600.0) -> Reply:
        """The whole reply. Waits also while the server restarts; `TimeoutError` when time is up,
        and the rollout goes on.
        """
        return self._client.run(flows.result(self.id, timeout_s))

    def delete(self) -> None:
        """Abort what runs of it, and forget it."""
        self._client.run(flows.tried(calls.delete(self.id), self._client.retries))


class AsyncRollout:
    """The same for asyncio."""

    def __init__(self, client: RunsAsync, id: str) -> None:
        self._client, self.id = client, id

    async def fetch(self, wait_s: float = 0.0) -> RolloutReply:
        return await self._client.run(
            flows.tried(calls.fetch(self.id, wait_s), self._client.retries)
        )

    async def result(self, timeout_s: float = 3600.0) -> Reply:
        return await self._client.run(flows.result(self.id, timeout_s))

    async def delete(self) -> None:
        await self._client.run(flows.tried(calls.delete(self.id), self._client.retries))
