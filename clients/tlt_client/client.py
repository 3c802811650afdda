"""Synchronous and asyncio HTTP clients of the native dialect; both build requests and read replies with the same functions.

An item that failed inside a batch is an `ItemResult` with `error`; a request that was refused raises `ServerError`. A rollout is a
batch that goes on without its client: `generate(..., detach=True)`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from os import PathLike, fspath
from types import TracebackType
from typing import Any, Literal, Self, overload

import httpx
import msgspec

from tlt_client.errors import ConnectionFailed
from tlt_client.responses import connection_errors, in_path, json_object, raise_for, whole_reply
from tlt_client.rollouts import AsyncRollout, Rollout, rollout_id, summaries
from tlt_client.wire import (
    Done,
    EventParser,
    GenerateBody,
    Item,
    Reply,
    RolloutSummary,
    SamplingFields,
    StreamEvent,
)

Items = Sequence[Item | dict[str, Any]]
Fields = SamplingFields | dict[str, Any] | None


def _options(url: str, api_key: str | None, timeout_s: float | None) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return {"base_url": url, "headers": headers, "timeout": httpx.Timeout(timeout_s, connect=10.0)}


def _body(items: Items, sampling: Fields, timeout_s: float | None, queue_timeout_s: float | None, *, stream: bool = False,
          detach: bool = False, key: str | None = None) -> dict[str, Any]:
    body = GenerateBody(requests=list(items), stream=stream, sampling=sampling if sampling is not None else msgspec.UNSET,
                        timeout_s=timeout_s if timeout_s is not None else msgspec.UNSET,
                        queue_timeout_s=queue_timeout_s if queue_timeout_s is not None else msgspec.UNSET, detach=detach)
    headers = {"content-type": "application/json"} | ({"idempotency-key": key} if key is not None else {})
    return {"content": msgspec.json.encode(body), "headers": headers}


def _policy(policy: str, strategy: str | None) -> dict[str, Any]:
    content = {"policy": policy} if strategy is None else {"policy": policy, "strategy": strategy}
    return {"content": msgspec.json.encode(content), "headers": {"content-type": "application/json"}}


class Client:
    """Blocking client. `timeout_s` bounds one wait for the network, not a generation: give `generate` a `timeout_s` for that, and a
    `queue_timeout_s` for how long the engine may take to begin it."""

    def __init__(self, url: str = "http://127.0.0.1:8000", *, api_key: str | None = None, timeout_s: float | None = None) -> None:
        self._http = httpx.Client(**_options(url, api_key, timeout_s))

    @overload
    def generate(self, items: Items, *, sampling: Fields = None, timeout_s: float | None = None,
                 queue_timeout_s: float | None = None, idempotency_key: str | None = None, detach: Literal[False] = False) -> Reply: ...

    @overload
    def generate(self, items: Items, *, sampling: Fields = None, timeout_s: float | None = None,
                 queue_timeout_s: float | None = None, idempotency_key: str | None = None, detach: Literal[True]) -> Rollout: ...

    def generate(self, items: Items, *, sampling: Fields = None, timeout_s: float | None = None,
                 queue_timeout_s: float | None = None, idempotency_key: str | None = None, detach: bool = False) -> Reply | Rollout:
        """The whole reply, or with `detach` at once a handle of the rollout that makes it.

        With an `idempotency_key`, such as a UUID, the same call may be repeated after any failure: it never runs twice.
        """
        body = _body(items, sampling, timeout_s, queue_timeout_s, detach=detach, key=idempotency_key)
        with connection_errors():
            response = self._http.post("/generate", **body)
        return Rollout(self._http, rollout_id(response)) if detach else whole_reply(response)

    def rollout(self, id: str) -> Rollout:
        """A handle of a rollout begun before; nothing is asked yet."""
        return Rollout(self._http, id)

    def rollouts(self) -> list[RolloutSummary]:
        """All rollouts that the server keeps, oldest first."""
        with connection_errors():
            response = self._http.get("/rollouts")
        return summaries(response)

    def stream(self, items: Items, *, sampling: Fields = None, timeout_s: float | None = None,
               queue_timeout_s: float | None = None) -> Generator[StreamEvent, None, None]:
        """Tokens as they come, each item as it ends, then one `Done`. Closing the iterator aborts what still runs."""
        parser, body = EventParser(), _body(items, sampling, timeout_s, queue_timeout_s, stream=True)
        with connection_errors(), self._http.stream("POST", "/generate", **body) as response:
            if response.is_error:
                response.read()
                raise_for(response)
            for line in response.iter_lines():
                event = parser.feed(line)
                if event is not None:
                    yield event
                if isinstance(event, Done):
                    return
        raise ConnectionFailed("the stream ended before its last event")

    def server_info(self) -> Mapping[str, Any]:
        with connection_errors():
            response = self._http.get("/server_info")
        return json_object(response)

    def strategy(self) -> Mapping[str, Any]:
        """The policy in force, the strategy of the last step, and the arms."""
        with connection_errors():
            return json_object(self._http.get("/strategy"))

    def set_strategy(self, policy: str, strategy: str | None = None) -> Mapping[str, Any]:
        """Replace the policy (`off`, `fixed` with a strategy such as "eagle:7x4x16", `beg`) between two steps; never changes a token."""
        with connection_errors():
            return json_object(self._http.put("/strategy", **_policy(policy, strategy)))

    def update_weights(self, path: str | PathLike[str], version: str, **fields: Any) -> Mapping[str, Any]:
        """Push the safetensors directory `path`, below the server's weight root; returns once it is live (or staged, or refused).

        Further fields of the manifest: `role`, `drafter_path`, `tensors`, `in_flight` (continue, recompute, abort, drain), `commit`.
        """
        return self.push_weights(version, path=fspath(path), **fields)

    def push_weights(self, version: str, **fields: Any) -> Mapping[str, Any]:
        """A push by any channel, as its manifest says; `tlt_client.channels` sends what belongs to it."""
        with connection_errors():
            return json_object(self._http.post("/update_weights", json={"version": version, **fields}))

    def put_weights(self, version: str, part: str, data: bytes, *, start: int, total: int) -> Mapping[str, Any]:
        """Send bytes `[start, start + len(data))` of a part of a version; the reply says how many are there."""
        headers = {"content-range": f"bytes {start}-{start + len(data) - 1}/{total}", "content-type": "application/octet-stream"}
        with connection_errors():
            return json_object(self._http.put(f"/weights/{in_path(version)}/{in_path(part)}", content=data, headers=headers))

    def weights_part(self, version: str, part: str) -> Mapping[str, Any]:
        """How much of a part is there."""
        with connection_errors():
            return json_object(self._http.get(f"/weights/{in_path(version)}/{in_path(part)}"))

    def join_group(self, name: str, **fields: Any) -> Mapping[str, Any]:
        """Let the server join the process group `name`; it answers once all ranks are there. Fields: `master_address`, `master_port`,
        `rank_offset`, `world_size`, `backend`, `prefixed`."""
        with connection_errors():
            return json_object(self._http.post("/weight_groups", json={"name": name, **fields}))

    def leave_group(self, name: str) -> Mapping[str, Any]:
        with connection_errors():
            return json_object(self._http.delete(f"/weight_groups/{in_path(name)}"))

    def commit_weights(self, version: str) -> Mapping[str, Any]:
        """Make a push live that was staged with `commit=False`."""
        with connection_errors():
            return json_object(self._http.post(f"/weights/{in_path(version)}/commit"))

    def abort_weights(self, version: str) -> Mapping[str, Any]:
        """End a push that is not committed; nothing changes."""
        with connection_errors():
            return json_object(self._http.post(f"/weights/{in_path(version)}/abort"))

    def roll_back_weights(self, **fields: Any) -> Mapping[str, Any]:
        """Make the version before the last commit live again; `to` names it, which makes a repeated call safe."""
        with connection_errors():
            return json_object(self._http.post("/weights/rollback", json=fields))

    def weights(self) -> Mapping[str, Any]:
        """Versions that are live, that a rollback would restore, and that are on their way."""
        with connection_errors():
            return json_object(self._http.get("/weights"))

    def weight_checksums(self) -> Mapping[str, str]:
        """sha256 of every live tensor's float32 values."""
        with connection_errors():
            return json_object(self._http.post("/weight_checker", json={"action": "checksum"}))["checksums"]

    def remember_weight_checksums(self) -> Mapping[str, str]:
        """The same; the server remembers them for `compare_weights`."""
        with connection_errors():
            return json_object(self._http.post("/weight_checker", json={"action": "reset"}))["checksums"]

    def compare_weights(self, baseline: Mapping[str, str] | None = None) -> list[str]:
        """Names of tensors that differ from a `baseline` of checksums, or without one from those that the server remembers."""
        fields = {"action": "compare"} if baseline is None else {"action": "compare", "baseline": dict(baseline)}
        with connection_errors():
            return json_object(self._http.post("/weight_checker", json=fields))["mismatches"]

    def metrics(self) -> str:
        """The Prometheus exposition, as text."""
        with connection_errors():
            response = self._http.get("/metrics")
        raise_for(response)
        return response.text

    def is_ready(self) -> bool:
        try:
            return self._http.get("/readyz").is_success
        except httpx.TransportError:
            return False

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class AsyncClient:
    """The same for asyncio."""

    def __init__(self, url: str = "http://127.0.0.1:8000", *, api_key: str | None = None, timeout_s: float | None = None) -> None:
        self._http = httpx.AsyncClient(**_options(url, api_key, timeout_s))

    @overload
    async def generate(self, items: Items, *, sampling: Fields = None, timeout_s: float | None = None,
                       queue_timeout_s: float | None = None, idempotency_key: str | None = None,
                       detach: Literal[False] = False) -> Reply: ...

    @overload
    async def generate(self, items: Items, *, sampling: Fields = None, timeout_s: float | None = None,
                       queue_timeout_s: float | None = None, idempotency_key: str | None = None,
                       detach: Literal[True]) -> AsyncRollout: ...

    async def generate(self, items: Items, *, sampling: Fields = None, timeout_s: float | None = None,
                       queue_timeout_s: float | None = None, idempotency_key: str | None = None,
                       detach: bool = False) -> Reply | AsyncRollout:
        body = _body(items, sampling, timeout_s, queue_timeout_s, detach=detach, key=idempotency_key)
        with connection_errors():
            response = await self._http.post("/generate", **body)
        return AsyncRollout(self._http, rollout_id(response)) if detach else whole_reply(response)

    def rollout(self, id: str) -> AsyncRollout:
        """A handle of a rollout begun before; nothing is asked yet."""
        return AsyncRollout(self._http, id)

    async def rollouts(self) -> list[RolloutSummary]:
        """All rollouts that the server keeps, oldest first."""
        with connection_errors():
            response = await self._http.get("/rollouts")
        return summaries(response)

    async def stream(self, items: Items, *, sampling: Fields = None, timeout_s: float | None = None,
                     queue_timeout_s: float | None = None) -> AsyncGenerator[StreamEvent, None]:
        parser, body = EventParser(), _body(items, sampling, timeout_s, queue_timeout_s, stream=True)
        with connection_errors():
            async with self._http.stream("POST", "/generate", **body) as response:
                if response.is_error:
                    await response.aread()
                    raise_for(response)
                async for line in response.aiter_lines():
                    event = parser.feed(line)
                    if event is not None:
                        yield event
                    if isinstance(event, Done):
                        return
        raise ConnectionFailed("the stream ended before its last event")

    async def server_info(self) -> Mapping[str, Any]:
        with connection_errors():
            response = await self._http.get("/server_info")
        return json_object(response)

    async def strategy(self) -> Mapping[str, Any]:
        """The policy in force, the strategy of the last step, and the arms."""
        with connection_errors():
            return json_object(await self._http.get("/strategy"))

    async def set_strategy(self, policy: str, strategy: str | None = None) -> Mapping[str, Any]:
        """Replace the policy (`off`, `fixed` with a strategy such as "eagle:7x4x16", `beg`) between two steps; never changes a token."""
        with connection_errors():
            return json_object(await self._http.put("/strategy", **_policy(policy, strategy)))

    async def update_weights(self, path: str | PathLike[str], version: str, **fields: Any) -> Mapping[str, Any]:
        """Push the safetensors directory `path`, below the server's weight root; returns once it is live (or staged, or refused).

        Further fields of the manifest: `role`, `drafter_path`, `tensors`, `in_flight` (continue, recompute, abort, drain), `commit`.
        """
        return await self.push_weights(version, path=fspath(path), **fields)

    async def push_weights(self, version: str, **fields: Any) -> Mapping[str, Any]:
        """A push by any channel, as its manifest says; `tlt_client.channels` sends what belongs to it."""
        with connection_errors():
            return json_object(await self._http.post("/update_weights", json={"version": version, **fields}))

    async def put_weights(self, version: str, part: str, data: bytes, *, start: int, total: int) -> Mapping[str, Any]:
        """Send bytes `[start, start + len(data))` of a part of a version; the reply says how many are there."""
        headers = {"content-range": f"bytes {start}-{start + len(data) - 1}/{total}", "content-type": "application/octet-stream"}
        with connection_errors():
            return json_object(await self._http.put(f"/weights/{in_path(version)}/{in_path(part)}", content=data, headers=headers))

    async def weights_part(self, version: str, part: str) -> Mapping[str, Any]:
        """How much of a part is there."""
        with connection_errors():
            return json_object(await self._http.get(f"/weights/{in_path(version)}/{in_path(part)}"))

    async def join_group(self, name: str, **fields: Any) -> Mapping[str, Any]:
        """Let the server join the process group `name`; it answers once all ranks are there. Fields: `master_address`, `master_port`,
        `rank_offset`, `world_size`, `backend`, `prefixed`."""
        with connection_errors():
            return json_object(await self._http.post("/weight_groups", json={"name": name, **fields}))

    async def leave_group(self, name: str) -> Mapping[str, Any]:
        with connection_errors():
            return json_object(await self._http.delete(f"/weight_groups/{in_path(name)}"))

    async def commit_weights(self, version: str) -> Mapping[str, Any]:
        """Make a push live that was staged with `commit=False`."""
        with connection_errors():
            return json_object(await self._http.post(f"/weights/{in_path(version)}/commit"))

    async def abort_weights(self, version: str) -> Mapping[str, Any]:
        """End a push that is not committed; nothing changes."""
        with connection_errors():
            return json_object(await self._http.post(f"/weights/{in_path(version)}/abort"))

    async def roll_back_weights(self, **fields: Any) -> Mapping[str, Any]:
        """Make the version before the last commit live again; `to` names it, which makes a repeated call safe."""
        with connection_errors():
            return json_object(await self._http.post("/weights/rollback", json=fields))

    async def weights(self) -> Mapping[str, Any]:
        """Versions that are live, that a rollback would restore, and that are on their way."""
        with connection_errors():
            return json_object(await self._http.get("/weights"))

    async def weight_checksums(self) -> Mapping[str, str]:
        """sha256 of every live tensor's float32 values."""
        with connection_errors():
            return json_object(await self._http.post("/weight_checker", json={"action": "checksum"}))["checksums"]

    async def remember_weight_checksums(self) -> Mapping[str, str]:
        """The same; the server remembers them for `compare_weights`."""
        with connection_errors():
            return json_object(await self._http.post("/weight_checker", json={"action": "reset"}))["checksums"]

    async def compare_weights(self, baseline: Mapping[str, str] | None = None) -> list[str]:
        """Names of tensors that differ from a `baseline` of checksums, or without one from those that the server remembers."""
        fields = {"action": "compare"} if baseline is None else {"action": "compare", "baseline": dict(baseline)}
        with connection_errors():
            return json_object(await self._http.post("/weight_checker", json=fields))["mismatches"]

    async def metrics(self) -> str:
        """The Prometheus exposition, as text."""
        with connection_errors():
            response = await self._http.get("/metrics")
        raise_for(response)
        return response.text

    async def is_ready(self) -> bool:
        try:
            return (await self._http.get("/readyz")).is_success
        except httpx.TransportError:
            return False

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()
