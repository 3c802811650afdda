"""The asyncio client of the native dialect: the operations of `client.Client`, awaited."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self, overload

from tlt_client import calls, exchanges, flows
from tlt_client.calls import Fields, Items
from tlt_client.exchanges import Of
from tlt_client.retries import NEVER, Retries
from tlt_client.rollouts import AsyncRollout
from tlt_client.tls import Tls
from tlt_client.transport import AsyncTransport, batch_key
from tlt_client.wire import (
    AbortReply,
    DrafterSamples,
    EngineState,
    Reply,
    RolloutSummary,
    StreamEvent,
    Weights,
)


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
        self,
        items: Items,
        *,
        sampling: Fields = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
        priority: int = 0,
        idempotency_key: str | None = None,
        detach: Literal[False] = False,
    ) -> Reply: ...

    @overload
    async def generate(
        self,
        items: Items,
        *,
        sampling: Fields = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
        priority: int = 0,
        idempotency_key: str | None = None,
        detach: Literal[True],
    ) -> AsyncRollout: ...

    async def generate(
        self,
        items: Items,
        *,
        sampling: Fields = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
        priority: int = 0,
        idempotency_key: str | None = None,
        detach: bool = False,
    ) -> Reply | AsyncRollout:
        key = batch_key(idempotency_key, self._transport.retries)
        batch = (items, sampling, timeout_s, queue_timeout_s, priority, key)
        if detach:
            id = await self._transport.ask(calls.detach(*batch))
            return AsyncRollout(self._transport, id)
        return await self._transport.ask(calls.generate(*batch))

    def stream(
        self,
        items: Items,
        *,
        sampling: Fields = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[StreamEvent, None]:
        call = calls.stream(items, sampling, timeout_s, queue_timeout_s, priority)
        return self._transport.events(call)

    def rollout(self, id: str) -> AsyncRollout:
        """Return a handle of a rollout that was started before; nothing is sent."""
        return AsyncRollout(self._transport, id)

    async def rollouts(self) -> list[RolloutSummary]:
        return await self._transport.ask(calls.rollouts())

    async def server_info(self) -> Mapping[str, Any]:
        return await self._transport.ask(calls.server_info())

    async def strategy(self) -> Mapping[str, Any]:
        return await self._transport.ask(calls.strategy())

    async def drafter(self) -> Mapping[str, Any]:
        return await self._transport.ask(calls.drafter())

    async def train_drafter(self) -> Mapping[str, Any]:
        return await self._transport.ask(calls.drafter_order("train"))

    async def pause_drafter_training(self, for_s: float | None = None) -> Mapping[str, Any]:
        return await self._transport.ask(calls.drafter_order("pause", for_s=for_s))

    async def resume_drafter_training(self) -> Mapping[str, Any]:
        return await self._transport.ask(calls.drafter_order("resume"))

    async def rollback_drafter(self) -> Mapping[str, Any]:
        return await self._transport.ask(calls.drafter_order("rollback"))

    async def export_drafter(self, name: str, layout: str = "eagle3") -> Mapping[str, Any]:
        return await self._transport.ask(calls.export_drafter(name, layout))

    async def drafter_samples(self, after: int = 0, *, limit: int = 256) -> DrafterSamples:
        return await self._transport.ask(calls.drafter_samples(after, limit))

    async def add_drafter_samples(self, content: bytes) -> Mapping[str, Any]:
        """Hand a server what another server of the same target gave by `drafter_samples`."""
        return await self._transport.ask(exchanges.add_drafter_samples(content))

    async def load(self) -> int:
        return await self._transport.ask(calls.load())

    async def drafter_files(self, of: Of = "live") -> Mapping[str, Any]:
        """Return version and files of the live drafter, or of the last `candidate` of the server's
        trainer, with its trial.
        """
        return await self._transport.ask(exchanges.drafter_files(of))

    async def drafter_file(
        self, version: str, name: str, *, start: int = 0, of: Of = "live"
    ) -> bytes:
        """Return 8 MiB of a file of such a drafter from byte `start` on, or what is left."""
        return await self._transport.ask(exchanges.drafter_file(version, name, start, of))

    async def fetch_drafter(
        self, directory: str | PathLike[str], of: Of = "live"
    ) -> Mapping[str, Any]:
        """Write these files into a directory, as `HttpSender.push_directory` takes them, and return
        what `drafter_files` says of them.
        """
        flow = exchanges.fetch_drafter(directory, of, self._transport.retries)
        return await self._transport.run(flow)

    async def set_strategy(
        self,
        policy: str,
        strategy: str | None = None,
        *,
        arms: Sequence[str] | None = None,
        pins: Sequence[Mapping[str, Any]] = (),
    ) -> Mapping[str, Any]:
        return await self._transport.ask(calls.set_strategy(policy, strategy, arms, pins))

    async def pause(
        self, in_flight: str = "continue", *, new_requests: str = "wait", clear_cache: bool = False
    ) -> EngineState:
        return await self._transport.ask(calls.pause(in_flight, new_requests, clear_cache))

    async def resume(self) -> EngineState:
        return await self._transport.ask(calls.resume())

    async def abort(self, *ids: str, all: bool = False) -> AbortReply:
        return await self._transport.ask(calls.abort(ids, all))

    async def sleep(self, *memory: str, in_flight: str = "recompute") -> EngineState:
        return await self._transport.ask(calls.sleep(memory, in_flight))

    async def wake(self, *memory: str) -> EngineState:
        return await self._transport.ask(calls.wake(memory))

    async def clear_cache(self, *, unless_held: bool = False) -> EngineState:
        return await self._transport.ask(calls.clear_cache(unless_held))

    async def update_weights(
        self, path: str | PathLike[str], version: str, **fields: Any
    ) -> Mapping[str, Any]:
        return await self._transport.ask(calls.update_weights(path, version, fields))

    async def push_weights(self, version: str, **fields: Any) -> Mapping[str, Any]:
        return await self._transport.ask(calls.push_weights(version, fields))

    async def put_weights(
        self, version: str, part: str, data: bytes, *, start: int, total: int
    ) -> Mapping[str, Any]:
        return await self._transport.ask(calls.put_weights(version, part, data, start, total))

    async def weights_part(self, version: str, part: str) -> Mapping[str, Any]:
        return await self._transport.ask(calls.weights_part(version, part))

    async def join_group(self, name: str, **fields: Any) -> Mapping[str, Any]:
        return await self._transport.ask(calls.join_group(name, fields))

    async def leave_group(self, name: str) -> Mapping[str, Any]:
        return await self._transport.ask(calls.leave_group(name))

    async def commit_weights(self, version: str) -> Mapping[str, Any]:
        return await self._transport.ask(calls.commit_weights(version))

    async def abort_weights(
        self, version: str = "", *, upload_only: bool = False
    ) -> Mapping[str, Any]:
        return await self._transport.ask(calls.abort_weights(version, upload_only))

    async def roll_back_weights(self, **fields: Any) -> Mapping[str, Any]:
        return await self._transport.ask(calls.roll_back_weights(fields))

    async def weights(self) -> Weights:
        return await self._transport.ask(calls.weights())

    async def unload_adapter(self, name: str, in_flight: str = "drain") -> Mapping[str, Any]:
        return await self._transport.ask(calls.unload_adapter(name, in_flight))

    async def weight_checksums(self) -> Mapping[str, str]:
        return await self._transport.ask(calls.weight_checksums("checksum"))

    async def remember_weight_checksums(self) -> Mapping[str, str]:
        return await self._transport.ask(calls.weight_checksums("snapshot"))

    async def compare_weights(self, baseline: Mapping[str, str] | None = None) -> list[str]:
        return await self._transport.ask(calls.compare_weights(baseline))

    async def metrics(self) -> str:
        return await self._transport.ask(calls.metrics())

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
