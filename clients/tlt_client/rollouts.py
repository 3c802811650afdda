"""Handles of rollouts: batches that go on without their client, made by `generate(..., detach=True)` or from an id."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import msgspec

from tlt_client.errors import ConnectionFailed, ServerError
from tlt_client.responses import connection_errors, in_path, raise_for
from tlt_client.wire import Reply, RolloutList, RolloutReply, RolloutStatus, RolloutSummary

LONGEST_POLL_S = 20.0
RETRY_S = 0.5  # while a server restarts


class Rollout:
    """A batch on its way: it goes on whatever becomes of this client. Results are kept for a while after its end (`rollout_ttl_s`)."""

    def __init__(self, http: httpx.Client, id: str) -> None:
        self._http, self.id = http, id

    def fetch(self, wait_s: float = 0.0) -> RolloutReply:
        """What has ended so far; with `wait_s` (at most 60), once all has ended or that time is up."""
        with connection_errors():
            return _fetched(self._http.get(f"/rollouts/{in_path(self.id)}", **_poll(self._http, wait_s)))

    def result(self, timeout_s: float = 3600.0) -> Reply:
        """The whole reply. Waits also while the server restarts; `TimeoutError` when time is up, and the rollout goes on."""
        give_up = time.monotonic() + timeout_s
        while True:
            left_s = give_up - time.monotonic()
            try:
                found = self.fetch(max(0.0, min(left_s, LONGEST_POLL_S)))
                if found.status == "done":
                    return Reply(found.results, found.usage, found.numerics)
            except (ConnectionFailed, ServerError) as error:
                if not _passes(error) or left_s <= 0:
                    raise
                time.sleep(RETRY_S)
            if left_s <= 0:
                raise _too_late(self.id, timeout_s)

    def delete(self) -> None:
        """Abort what runs of it, and forget it."""
        with connection_errors():
            raise_for(self._http.delete(f"/rollouts/{in_path(self.id)}"))


class AsyncRollout:
    """The same for asyncio."""

    def __init__(self, http: httpx.AsyncClient, id: str) -> None:
        self._http, self.id = http, id

    async def fetch(self, wait_s: float = 0.0) -> RolloutReply:
        with connection_errors():
            return _fetched(await self._http.get(f"/rollouts/{in_path(self.id)}", **_poll(self._http, wait_s)))

    async def result(self, timeout_s: float = 3600.0) -> Reply:
        give_up = time.monotonic() + timeout_s
        while True:
            left_s = give_up - time.monotonic()
            try:
                found = await self.fetch(max(0.0, min(left_s, LONGEST_POLL_S)))
                if found.status == "done":
                    return Reply(found.results, found.usage, found.numerics)
            except (ConnectionFailed, ServerError) as error:
                if not _passes(error) or left_s <= 0:
                    raise
                await asyncio.sleep(RETRY_S)
            if left_s <= 0:
                raise _too_late(self.id, timeout_s)

    async def delete(self) -> None:
        with connection_errors():
            raise_for(await self._http.delete(f"/rollouts/{in_path(self.id)}"))


def rollout_id(response: httpx.Response) -> str:
    raise_for(response)
    return msgspec.json.decode(response.content, type=RolloutStatus).id


def summaries(response: httpx.Response) -> list[RolloutSummary]:
    raise_for(response)
    return msgspec.json.decode(response.content, type=RolloutList).rollouts


def _poll(http: httpx.Client | httpx.AsyncClient, wait_s: float) -> dict[str, Any]:
    """A wait of the server's, on top of one for the network."""
    limits = http.timeout
    read_s = None if limits.read is None else limits.read + wait_s
    return {"params": {"wait_s": wait_s},
            "timeout": httpx.Timeout(connect=limits.connect, read=read_s, write=limits.write, pool=limits.pool)}


def _fetched(response: httpx.Response) -> RolloutReply:
    raise_for(response)
    return msgspec.json.decode(response.content, type=RolloutReply)


def _too_late(id: str, timeout_s: float) -> TimeoutError:
    return TimeoutError(f"the rollout {id} is not done after {timeout_s:g} s; it goes on: ask again, or delete it")


def _passes(error: ServerError | ConnectionFailed) -> bool:
    """Whether a server that restarts may say this."""
    return isinstance(error, ConnectionFailed) or error.retryable
