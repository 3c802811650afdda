"""Handles of rollouts: batches that go on without their client, made by `generate(...,
detach=True)` or from an id.
"""

from __future__ import annotations

from tlt_client import calls, flows
from tlt_client.transport import AsyncTransport, Transport
from tlt_client.wire import Reply, RolloutReply


class Rollout:
    """A batch that goes on without its client. The server keeps results for `rollout_ttl_s` after
    its end.
    """

    def __init__(self, transport: Transport, id: str) -> None:
        self._transport, self.id = transport, id

    def fetch(self, wait_s: float = 0.0) -> RolloutReply:
        """Return the results so far; with `wait_s` (at most 60) wait until all have ended."""
        return self._transport.ask(calls.fetch(self.id, wait_s))

    def result(self, timeout_s: float = 3600.0) -> Reply:
        """Return the whole reply; wait also while the server restarts. Raise `TimeoutError` when
        time is up; the rollout goes on.
        """
        return self._transport.run(flows.result(self.id, timeout_s))

    def delete(self) -> None:
        """Abort its running items, and forget it."""
        self._transport.ask(calls.delete(self.id))


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
