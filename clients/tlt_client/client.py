"""Synchronous and asyncio HTTP clients of the native dialect: what to send and how to read it is in
`calls` and `flows`, once for both.

An item that failed inside a batch is an `ItemResult` with `error`; a request that was refused
raises the `ServerError` of its code. A rollout is a batch that goes on without its client:
`generate(..., detach=True)`.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Generator, Mapping
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

import httpx

from tlt_client import calls, flows
from tlt_client.arguments import bearer, url_of
from tlt_client.calls import Call, Fields, Items
from tlt_client.errors import ConnectionFailed, TltClientError
from tlt_client.flows import Flow, Pause
from tlt_client.responses import connection_errors
from tlt_client.retries import NEVER, Retries
from tlt_client.rollouts import AsyncRollout, Rollout
from tlt_client.tls import Tls
from tlt_client.wire import Done, EventParser, Reply, RolloutSummary, StreamEvent, Weights

T = TypeVar("T")
TRUNCATED = "the stream ended before its last event"


def _options(
    url: str, api_key: str | None, timeout_s: float | None, tls: Tls | None
) -> dict[str, Any]:
    verify = {"verify": tls.context()} if tls is not None else {}
    limits = httpx.Limits(max_connections=None)  # how much may be open is the server's to say
    timeout = httpx.Timeout(timeout_s, connect=10.0)
    return {
        "base_url": url_of(url),
        "headers": bearer(api_key),
        "timeout": timeout,
        "limits": limits,
        **verify,
    }


def _key(key: str | None, retries: Retries) -> str | None:
    """A batch that may be sent twice has a name, so that it runs once."""
    return key if key is not None or not retries.times else str(uuid.uuid4())


class Client:
    """Blocking client. `timeout_s` bounds one wait for the network, not a generation: give
    `generate` a `timeout_s` for that, and a `queue_timeout_s` for how long the engine may take to
    begin it. `api_key` goes along as the bearer token, `tls` says whom to trust.

    With `retries` what failed and may pass is sent again. So that a batch never runs twice it then
    has an idempotency key, yours or a new one, and is a rollout: it goes on when this client
    leaves. A stream is sent again only until it has begun.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        timeout_s: float | None = None,
        tls: Tls | None = None,
        retries: Retries = NEVER,
    ) -> None:
        self._http = httpx.Client(**_options(url, api_key, timeout_s, tls))
        self.retries = retries

    @overload
    def generate(
        self,
        items: Items,
        *,
        sampling: Fields = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
        idempotency_key: str | None = None,
        detach: Literal[False] = False,
    ) -> Reply: ...

    @overload
    def generate(
        self,
        items: Items,
        *,
        sampling: Fields = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
        idempotency_key: str | None = None,
        detach: Literal[True],
    ) -> Rollout: ...

    def generate(
        self,
        items: Items,
        *,
        sampling: Fields = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
        idempotency_key: str | None = None,
        detach: bool = False,
    ) -> Reply | Rollout:
        """The whole reply, or with `detach` at once a handle of the rollout that makes it.

        With an `idempotency_key`, such as a UUID, the same call may be repeated after any failure:
        it never runs twice.
        """
        asked, key = (
            (items, sampling, timeout_s, queue_timeout_s),
            _key(idempotency_key, self.retries),
        )
        if detach:
            return Rollout(self, self._ask(calls.detach(*asked, key)))
        return self._ask(calls.generate(*asked, key))

    def stream(
        self,
        items: Items,
        *,
        sampling: Fields = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> Generator[StreamEvent, None, None]:
        """Tokens as they come, each item as it ends, then one `Done`. Closing the iterator aborts
        what still runs.
        """
        parser, response = (
            EventParser(),
            self._ask(calls.stream(items, sampling, timeout_s, queue_timeout_s)),
        )
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

    def rollout(self, id: str) -> Rollout:
        """A handle of a rollout begun before; nothing is asked yet."""
        return Rollout(self, id)

    def rollouts(self) -> list[RolloutSummary]:
        """The rollouts that this key began, oldest first; with the scope operate, everybody's."""
        return self._ask(calls.rollouts())

    def server_info(self) -> Mapping[str, Any]:
        """What the server is: model, engine, limits and settings."""
        return self._ask(calls.server_info())

    def strategy(self) -> Mapping[str, Any]:
        """The policy in force, the strategy of the last step, and the arms."""
        return self._ask(calls.strategy())

    def set_strategy(self, policy: str, strategy: str | None = None) -> Mapping[str, Any]:
        """Replace the policy (`off`, `fixed` with a strategy such as "eagle:7x4x16", `beg`) between
        two steps; never changes a token.
        """
        return self._ask(calls.set_strategy(policy, strategy))

    def pause(self, in_flight: str = "continue") -> Mapping[str, Any]:
        """Stop generating until `resume`; new requests wait. What runs is frozen with its KV
        (`continue`), or gives it back and computes it again (`recompute`), or ends with what it has
        (`abort`).
        """
        return self._ask(calls.pause(in_flight))

    def resume(self) -> Mapping[str, Any]:
        """Go on with what was paused or has waited."""
        return self._ask(calls.resume())

    def abort_request(self, id: str) -> Mapping[str, Any]:
        """End the item of this name with what it has; its reply says finish_reason "abort". One
        that is not open is ended already.
        """
        return self._ask(calls.abort_request(id))

    def sleep(self, *memory: str) -> Mapping[str, Any]:
        """Give memory back: "weights", "kv_cache", or without a name both. New requests are refused
        until all is awake; what runs goes on then with the same tokens.
        """
        return self._ask(calls.sleep(memory))

    def wake(self, *memory: str) -> Mapping[str, Any]:
        """Take memory again, weights bit for bit as they were."""
        return self._ask(calls.wake(memory))

    def clear_cache(self) -> Mapping[str, Any]:
        """Forget every cached prefix; what runs keeps its own KV."""
        return self._ask(calls.clear_cache())

    def update_weights(
        self, path: str | PathLike[str], version: str, **fields: Any
    ) -> Mapping[str, Any]:
        """Push the safetensors directory `path`, below the server's weight root; returns once it is
        live (or staged, or refused).

        Further fields of the manifest: `role`, `drafter_path`, `tensors`, `in_flight` (continue,
        recompute, abort, drain), `commit`.
        """
        return self._ask(calls.update_weights(path, version, fields))

    def push_weights(self, version: str, **fields: Any) -> Mapping[str, Any]:
        """A push by any channel, as its manifest says; `tlt_client.channels` sends what belongs to
        it.
        """
        return self._ask(calls.push_weights(version, fields))

    def put_weights(
        self, version: str, part: str, data: bytes, *, start: int, total: int
    ) -> Mapping[str, Any]:
        """Send bytes `[start, start + len(data))` of a part of a version; the reply says how many
        are there.
        """
        return self._ask(calls.put_weights(version, part, data, start, total))

    def weights_part(self, version: str, part: str) -> Mapping[str, Any]:
        """How much of a part is there."""
        return self._ask(calls.weights_part(version, part))

    def join_group(self, name: str, **fields: Any) -> Mapping[str, Any]:
        """Let the server join the process group `name`; it answers once all ranks are there.
        Fields: `master_address`, `master_port`, `rank_offset`, `world_size`, `backend`, `prefixed`.
        """
        return self._ask(calls.join_group(name, fields))

    def leave_group(self, name: str) -> Mapping[str, Any]:
        return self._ask(calls.leave_group(name))

    def commit_weights(self, version: str) -> Mapping[str, Any]:
        """Make a push live that was staged with `commit=False`; `unchanged` where its last push is
        live already.
        """
        return self._ask(calls.commit_weights(version))

    def abort_weights(self, version: str = "", *, upload_only: bool = False) -> Mapping[str, Any]:
        """End the push of this version, or the one on its way whatever it is called, while it is
        not committed; nothing changes. With `upload_only` only what was sent of the version by http
        and is not being pushed.
        """
        return self._ask(calls.abort_weights(version, upload_only))

    def roll_back_weights(self, **fields: Any) -> Mapping[str, Any]:
        """Undo the last commit; or with `to` make that version live again, of each model that had
        it before, which makes a repeated call safe.
        """
        return self._ask(calls.roll_back_weights(fields))

    def weights(self) -> Weights:
        """Versions that are live, that a rollback would restore, and that are on their way, by http
        in parts or as a push.
        """
        return self._ask(calls.weights())

    def weight_checksums(self) -> Mapping[str, str]:
        """mix64 of every live tensor's values (`tlt_client.channels.sums`)."""
        return self._ask(calls.weight_checksums("checksum"))

    def remember_weight_checksums(self) -> Mapping[str, str]:
        """The same; the server remembers them for `compare_weights`."""
        return self._ask(calls.weight_checksums("reset"))

    def compare_weights(self, baseline: Mapping[str, str] | None = None) -> list[str]:
        """Names of tensors that differ from a `baseline` of checksums, or without one from those
        that the server remembers.
        """
        return self._ask(calls.compare_weights(baseline))

    def metrics(self) -> str:
        """The Prometheus exposition, as text."""
        return self._ask(calls.metrics())

    def is_ready(self) -> bool:
        """Whether a request sent now would be taken; a server that is not reached is not ready."""
        return self.run(flows.ready())

    def _ask(self, call: Call[T]) -> T:
        return self.run(flows.tried(call, self.retries))

    def run(self, flow: Flow[T]) -> T:
        """Take the steps of a flow."""
        try:
            step = next(flow)
            while True:
                try:
                    value = self._step(step)
                except TltClientError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(value)
        except StopIteration as end:
            result: T = end.value
            return result

    def _step(self, step: Call[Any] | Pause) -> Any:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return None
        with connection_errors():
            response = self._http.send(step.request(self._http), stream=step.streams)
            if step.streams and response.is_error:
                response.read()
        return step.read(response)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient:
    """The same for asyncio."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        timeout_s: float | None = None,
        tls: Tls | None = None,
        retries: Retries = NEVER,
    ) -> None:
        self._http = httpx.AsyncClient(**_options(url, api_key, timeout_s, tls))
        self.retries = retries

    @overload
    async def generate(
        self,
        items: Items,
        *,
        sampling: Fields = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
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
        idempotency_key: str | None = None,
        detach: bool = False,
    ) -> Reply | AsyncRollout:
        asked, key = (
            (items, sampling, timeout_s, queue_timeout_s),
            _key(idempotency_key, self.retries),
        )
        if detach:
            return AsyncRollout(self, await self._ask(calls.detach(*asked, key)))
        return await self._ask(calls.generate(*asked, key))

    async def stream(
        self,
        items: Items,
        *,
        sampling: Fields = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> AsyncGenerator[StreamEvent, None]:
        parser, response = (
            EventParser(),
            await self._ask(calls.stream(items, sampling, timeout_s, queue_timeout_s)),
        )
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

    def rollout(self, id: str) -> AsyncRollout:
        """A handle of a rollout begun before; nothing is asked yet."""
        return AsyncRollout(self, id)

    async def rollouts(self) -> list[RolloutSummary]:
        return await self._ask(calls.rollouts())

    async def server_info(self) -> Mapping[str, Any]:
        return await self._ask(calls.server_info())

    async def strategy(self) -> Mapping[str, Any]:
        return await self._ask(calls.strategy())

    async def set_strategy(self, policy: str, strategy: str | None = None) -> Mapping[str, Any]:
        return await self._ask(calls.set_strategy(policy, strategy))

    async def pause(self, in_flight: str = "continue") -> Mapping[str, Any]:
        return await self._ask(calls.pause(in_flight))

    async def resume(self) -> Mapping[str, Any]:
        return await self._ask(calls.resume())

    async def abort_request(self, id: str) -> Mapping[str, Any]:
        return await self._ask(calls.abort_request(id))

    async def sleep(self, *memory: str) -> Mapping[str, Any]:
        return await self._ask(calls.sleep(memory))

    async def wake(self, *memory: str) -> Mapping[str, Any]:
        return await self._ask(calls.wake(memory))

    async def clear_cache(self) -> Mapping[str, Any]:
        return await self._ask(calls.clear_cache())

    async def update_weights(
        self, path: str | PathLike[str], version: str, **fields: Any
    ) -> Mapping[str, Any]:
        return await self._ask(calls.update_weights(path, version, fields))

    async def push_weights(self, version: str, **fields: Any) -> Mapping[str, Any]:
        return await self._ask(calls.push_weights(version, fields))

    async def put_weights(
        self, version: str, part: str, data: bytes, *, start: int, total: int
    ) -> Mapping[str, Any]:
        return await self._ask(calls.put_weights(version, part, data, start, total))

    async def weights_part(self, version: str, part: str) -> Mapping[str, Any]:
        return await self._ask(calls.weights_part(version, part))

    async def join_group(self, name: str, **fields: Any) -> Mapping[str, Any]:
        return await self._ask(calls.join_group(name, fields))

    async def leave_group(self, name: str) -> Mapping[str, Any]:
        return await self._ask(calls.leave_group(name))

    async def commit_weights(self, version: str) -> Mapping[str, Any]:
        return await self._ask(calls.commit_weights(version))

    async def abort_weights(
        self, version: str = "", *, upload_only: bool = False
    ) -> Mapping[str, Any]:
        return await self._ask(calls.abort_weights(version, upload_only))

    async def roll_back_weights(self, **fields: Any) -> Mapping[str, Any]:
        return await self._ask(calls.roll_back_weights(fields))

    async def weights(self) -> Weights:
        return await self._ask(calls.weights())

    async def weight_checksums(self) -> Mapping[str, str]:
        return await self._ask(calls.weight_checksums("checksum"))

    async def remember_weight_checksums(self) -> Mapping[str, str]:
        return await self._ask(calls.weight_checksums("reset"))

    async def compare_weights(self, baseline: Mapping[str, str] | None = None) -> list[str]:
        return await self._ask(calls.compare_weights(baseline))

    async def metrics(self) -> str:
        return await self._ask(calls.metrics())

    async def is_ready(self) -> bool:
        return await self.run(flows.ready())

    async def _ask(self, call: Call[T]) -> T:
        return await self.run(flows.tried(call, self.retries))

    async def run(self, flow: Flow[T]) -> T:
        try:
            step = next(flow)
            while True:
                try:
                    value = await self._step(step)
                except TltClientError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(value)
        except StopIteration as end:
            result: T = end.value
            return result

    async def _step(self, step: Call[Any] | Pause) -> Any:
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return None
        with connection_errors():
            response = await self._http.send(step.request(self._http), stream=step.streams)
            if step.streams and response.is_error:
                await response.aread()
        return step.read(response)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
