"""Synchronous and asyncio HTTP clients of the native dialect; both build requests and read replies with the same functions.

An item that failed inside a batch is an `ItemResult` with `error`; a request that was refused raises `ServerError`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike, fspath
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec

from tlt_client.errors import ConnectionFailed, ServerError
from tlt_client.wire import Done, EventParser, GenerateBody, Item, Reply, SamplingFields, StreamEvent, WireError

Items = Sequence[Item | dict[str, Any]]
Fields = SamplingFields | dict[str, Any] | None
_REPLY = msgspec.json.Decoder(Reply)


class _Refusal(msgspec.Struct):
    error: WireError


def _options(url: str, api_key: str | None, timeout_s: float | None) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return {"base_url": url, "headers": headers, "timeout": httpx.Timeout(timeout_s, connect=10.0)}


def _body(items: Items, sampling: Fields, timeout_s: float | None, queue_timeout_s: float | None, stream: bool) -> dict[str, Any]:
    body = GenerateBody(requests=list(items), stream=stream, sampling=sampling if sampling is not None else msgspec.UNSET,
                        timeout_s=timeout_s if timeout_s is not None else msgspec.UNSET,
                        queue_timeout_s=queue_timeout_s if queue_timeout_s is not None else msgspec.UNSET)
    return {"content": msgspec.json.encode(body), "headers": {"content-type": "application/json"}}


def _reply(response: httpx.Response) -> Reply:
    """The reply; one in which every item failed comes with an error status and is still a reply."""
    if response.is_error:
        try:
            return _REPLY.decode(response.content)
        except msgspec.MsgspecError:
            _raise_for(response)
    return _REPLY.decode(response.content)


def _raise_for(response: httpx.Response) -> None:
    if not response.is_error:
        return
    wait = response.headers.get("retry-after", "")
    retry_after_s = float(wait) if wait.isdigit() else None
    try:
        error = msgspec.json.decode(response.content, type=_Refusal).error
    except msgspec.MsgspecError:
        error = WireError("unknown", response.text[:500], retryable=response.status_code in (429, 503))
    raise ServerError(error.code, error.message, status=response.status_code, retryable=error.retryable, retry_after_s=retry_after_s)


def _object(response: httpx.Response) -> Mapping[str, Any]:
    _raise_for(response)
    return msgspec.json.decode(response.content, type=dict[str, Any])


def _policy(policy: str, strategy: str | None) -> dict[str, Any]:
    content = {"policy": policy} if strategy is None else {"policy": policy, "strategy": strategy}
    return {"content": msgspec.json.encode(content), "headers": {"content-type": "application/json"}}


@contextmanager
def _connection_errors() -> Iterator[None]:
    try:
        yield
    except httpx.TransportError as error:
        raise ConnectionFailed(f"{type(error).__name__}: {error}") from error


class Client:
    """Blocking client. `timeout_s` bounds one wait for the network, not a generation: give `generate` a `timeout_s` for that, and a
    `queue_timeout_s` for how long the engine may take to begin it."""

    def __init__(self, url: str = "http://127.0.0.1:8000", *, api_key: str | None = None, timeout_s: float | None = None) -> None:
        self._http = httpx.Client(**_options(url, api_key, timeout_s))

    def generate(self, items: Items, *, sampling: Fields = None, timeout_s: float | None = None,
                 queue_timeout_s: float | None = None) -> Reply:
        with _connection_errors():
            return _reply(self._http.post("/generate", **_body(items, sampling, timeout_s, queue_timeout_s, stream=False)))

    def stream(self, items: Items, *, sampling: Fields = None, timeout_s: float | None = None,
               queue_timeout_s: float | None = None) -> Generator[StreamEvent, None, None]:
        """Tokens as they come, each item as it ends, then one `Done`. Closing the iterator aborts what still runs."""
        parser, body = EventParser(), _body(items, sampling, timeout_s, queue_timeout_s, stream=True)
        with _connection_errors(), self._http.stream("POST", "/generate", **body) as response:
            if response.is_error:
                response.read()
                _raise_for(response)
            for line in response.iter_lines():
                event = parser.feed(line)
                if event is not None:
                    yield event
                if isinstance(event, Done):
                    return
        raise ConnectionFailed("the stream ended before its last event")

    def server_info(self) -> Mapping[str, Any]:
        with _connection_errors():
            response = self._http.get("/server_info")
        return _object(response)

    def strategy(self) -> Mapping[str, Any]:
        """The policy in force, the strategy of the last step, and the arms."""
        with _connection_errors():
            return _object(self._http.get("/strategy"))

    def set_strategy(self, policy: str, strategy: str | None = None) -> Mapping[str, Any]:
        """Replace the policy (`off`, `fixed` with a strategy such as "eagle:7x4x16", `beg`) between two steps; never changes a token."""
        with _connection_errors():
            return _object(self._http.put("/strategy", **_policy(policy, strategy)))

    def update_weights(self, path: str | PathLike[str], version: str, **fields: Any) -> Mapping[str, Any]:
        """Push the safetensors directory `path`, below the server's weight root; returns once it is live (or staged, or refused).

        Further fields of the manifest: `role`, `drafter_path`, `tensors`, `in_flight` (continue, recompute, abort, drain), `commit`.
        """
        with _connection_errors():
            return _object(self._http.post("/update_weights", json={"path": fspath(path), "version": version, **fields}))

    def roll_back_weights(self, **fields: Any) -> Mapping[str, Any]:
        """Make the version before the last commit live again; `to` names it, which makes a repeated call safe."""
        with _connection_errors():
            return _object(self._http.post("/weights/rollback", json=fields))

    def weights(self) -> Mapping[str, Any]:
        """Versions that are live, that a rollback would restore, and that are on their way."""
        with _connection_errors():
            return _object(self._http.get("/weights"))

    def weight_checksums(self) -> Mapping[str, str]:
        """sha256 of every live tensor's float32 values."""
        with _connection_errors():
            return _object(self._http.post("/weight_checker", json={"action": "checksum"}))["checksums"]

    def metrics(self) -> str:
        """The Prometheus exposition, as text."""
        with _connection_errors():
            response = self._http.get("/metrics")
        _raise_for(response)
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

    async def generate(self, items: Items, *, sampling: Fields = None, timeout_s: float | None = None,
                       queue_timeout_s: float | None = None) -> Reply:
        with _connection_errors():
            return _reply(await self._http.post("/generate", **_body(items, sampling, timeout_s, queue_timeout_s, stream=False)))

    async def stream(self, items: Items, *, sampling: Fields = None, timeout_s: float | None = None,
                     queue_timeout_s: float | None = None) -> AsyncGenerator[StreamEvent, None]:
        parser, body = EventParser(), _body(items, sampling, timeout_s, queue_timeout_s, stream=True)
        with _connection_errors():
            async with self._http.stream("POST", "/generate", **body) as response:
                if response.is_error:
                    await response.aread()
                    _raise_for(response)
                async for line in response.aiter_lines():
                    event = parser.feed(line)
                    if event is not None:
                        yield event
                    if isinstance(event, Done):
                        return
        raise ConnectionFailed("the stream ended before its last event")

    async def server_info(self) -> Mapping[str, Any]:
        with _connection_errors():
            response = await self._http.get("/server_info")
        return _object(response)

    async def strategy(self) -> Mapping[str, Any]:
        """The policy in force, the strategy of the last step, and the arms."""
        with _connection_errors():
            return _object(await self._http.get("/strategy"))

    async def set_strategy(self, policy: str, strategy: str | None = None) -> Mapping[str, Any]:
        """Replace the policy (`off`, `fixed` with a strategy such as "eagle:7x4x16", `beg`) between two steps; never changes a token."""
        with _connection_errors():
            return _object(await self._http.put("/strategy", **_policy(policy, strategy)))

    async def update_weights(self, path: str | PathLike[str], version: str, **fields: Any) -> Mapping[str, Any]:
        """Push the safetensors directory `path`, below the server's weight root; returns once it is live (or staged, or refused).

        Further fields of the manifest: `role`, `drafter_path`, `tensors`, `in_flight` (continue, recompute, abort, drain), `commit`.
        """
        with _connection_errors():
            return _object(await self._http.post("/update_weights", json={"path": fspath(path), "version": version, **fields}))

    async def roll_back_weights(self, **fields: Any) -> Mapping[str, Any]:
        """Make the version before the last commit live again; `to` names it, which makes a repeated call safe."""
        with _connection_errors():
            return _object(await self._http.post("/weights/rollback", json=fields))

    async def weights(self) -> Mapping[str, Any]:
        """Versions that are live, that a rollback would restore, and that are on their way."""
        with _connection_errors():
            return _object(await self._http.get("/weights"))

    async def weight_checksums(self) -> Mapping[str, str]:
        """sha256 of every live tensor's float32 values."""
        with _connection_errors():
            return _object(await self._http.post("/weight_checker", json={"action": "checksum"}))["checksums"]

    async def metrics(self) -> str:
        """The Prometheus exposition, as text."""
        with _connection_errors():
            response = await self._http.get("/metrics")
        _raise_for(response)
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
