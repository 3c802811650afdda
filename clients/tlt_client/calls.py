"""Operations of the server as values: a request, and the reader of its reply. No I/O, no clock.

An operation is written once: here, in `weight_calls` or in `drafter_calls`, with its arguments and
its docstring. `Operations` has a line for each, which makes a method of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypedDict, TypeVar, Unpack

import httpx
import msgspec

from tlt_client.arguments import check_finite, plain
from tlt_client.fields import GenerateBody, Item, SamplingFields
from tlt_client.responses import in_path, json_object, read_as, succeeded, whole_reply
from tlt_client.wire import (
    AbortReply,
    EngineState,
    FleetStatus,
    ReplicaStatus,
    Reply,
    RolloutList,
    RolloutReply,
    RolloutStatus,
    RolloutSummary,
)

Items = Sequence[Item | dict[str, Any]]
Fields = SamplingFields | dict[str, Any] | None
T = TypeVar("T")

_rollout_reply, _status, _list = read_as(RolloutReply), read_as(RolloutStatus), read_as(RolloutList)
_state, _fleet, _replica = read_as(EngineState), read_as(FleetStatus), read_as(ReplicaStatus)


@dataclass(frozen=True)
class Call(Generic[T]):
    method: str
    path: str
    read: Callable[[httpx.Response], T]  # return the reply's value, or raise its error
    content: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, float | str] = field(default_factory=dict)
    repeatable: bool = False  # a second run equals the first
    streams: bool = False  # the reply is read as it comes
    wait_s: float = 0.0  # time that the server may wait before it replies
    within_s: float | None = None  # upper bound of the wait for a reply

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        limits = http.timeout
        read_s = None if limits.read is None else limits.read + self.wait_s
        read_s = min(
            (seconds for seconds in (read_s, self.within_s) if seconds is not None), default=None
        )
        timeout = httpx.Timeout(
            connect=limits.connect, read=read_s, write=limits.write, pool=limits.pool
        )
        return http.build_request(
            self.method,
            self.path,
            content=self.content,
            headers=dict(self.headers),
            params=dict(self.params) or None,
            timeout=timeout,
        )


def put(
    method: str,
    path: str,
    content: Any,
    read: Callable[[httpx.Response], T],
    headers: Mapping[str, str] | None = None,
    **options: Any,
) -> Call[T]:
    """Return a call with a JSON body."""
    body = msgspec.json.encode(content, enc_hook=plain)
    return Call(
        method, path, read, body, {"content-type": "application/json", **(headers or {})}, **options
    )


# batches


class StreamFields(TypedDict, total=False):
    """Options of a batch; omitted ones have the server's defaults."""

    sampling: Fields
    timeout_s: float | None
    queue_timeout_s: float | None
    priority: int


class BatchFields(StreamFields, total=False):
    idempotency_key: str | None


def generate(items: Items, **options: Unpack[BatchFields]) -> Call[Reply]:
    return _batch(items, whole_reply, options)


def detach(items: Items, **options: Unpack[BatchFields]) -> Call[str]:
    """Return a call whose value is the id of the rollout."""
    return _batch(items, lambda response: _status(response).id, options, detach=True)


def stream(items: Items, **options: Unpack[StreamFields]) -> Call[httpx.Response]:
    """Return a call whose value is the open response."""
    return _batch(items, succeeded, {**options}, stream=True)


def _batch(
    items: Items,
    read: Callable[[httpx.Response], T],
    options: BatchFields,
    *,
    detach: bool = False,
    stream: bool = False,
) -> Call[T]:
    fields: dict[str, Any] = {**options, "requests": list(items)}
    key = fields.pop("idempotency_key", None)
    if fields.get("sampling") is None:
        fields["sampling"] = msgspec.UNSET
    for name, value in fields.items():
        check_finite(name, value)
    body = GenerateBody(**fields, detach=detach, stream=stream)
    headers = {"idempotency-key": key} if key is not None else {}
    return put("POST", "/generate", body, read, headers, repeatable=key is not None, streams=stream)


# rollouts


def rollouts() -> Call[list[RolloutSummary]]:
    """Return this key's rollouts, oldest first; with the scope operate, those of all keys."""
    return Call("GET", "/rollouts", lambda response: _list(response).rollouts, repeatable=True)


def fetch(id: str, wait_s: float) -> Call[RolloutReply]:
    path, params = f"/rollouts/{in_path(id)}", {"wait_s": wait_s}
    return Call("GET", path, _rollout_reply, params=params, repeatable=True, wait_s=wait_s)


def delete(id: str) -> Call[httpx.Response]:
    return Call("DELETE", f"/rollouts/{in_path(id)}", succeeded)


# the server


def ready() -> Call[bool]:
    return Call("GET", "/readyz", lambda response: response.is_success)


def server_info() -> Call[Mapping[str, Any]]:
    """Return the server's model, engine, limits and settings."""
    return Call("GET", "/server_info", json_object, repeatable=True)


def metrics() -> Call[str]:
    """Return the Prometheus exposition, as text."""
    return Call("GET", "/metrics", lambda response: succeeded(response).text, repeatable=True)


def load() -> Call[int]:
    """Return the number of sequences that the server has accepted and not ended."""
    return Call(
        "GET", "/load", lambda response: int(json_object(response)["server_load"]), repeatable=True
    )


def strategy() -> Call[Mapping[str, Any]]:
    """Return the active policy, its arms and pins, the strategy of the last step, its expected
    speed, and the last switches with their reasons.
    """
    return Call("GET", "/strategy", json_object, repeatable=True)


def set_strategy(
    policy: str,
    strategy: str | None = None,
    *,
    arms: Sequence[str] | None = None,
    pins: Sequence[Mapping[str, Any]] = (),
) -> Call[Mapping[str, Any]]:
    """Replace the policy (`off`, `fixed` with a strategy such as "eagle:7x4x16", `beg`, `goodput`)
    between two steps; this never changes a token. If the answer names it under `preparing`, its
    kernels are still being compiled: `strategy` shows when it is active.

    `arms`: drafters and strategies that the policy may choose from. `pins`: strategies that
    override it, such as {"batch": [1, 8], "strategy": "eagle:7x1x8"}.
    """
    fields = {"strategy": strategy, "arms": arms, "pins": pins or None}
    given = {name: value for name, value in fields.items() if value is not None}
    return put("PUT", "/strategy", {"policy": policy, **given}, json_object, repeatable=True)


# pauses and memory


def pause(
    in_flight: str = "continue", *, new_requests: str = "wait", clear_cache: bool = False
) -> Call[EngineState]:
    """Stop generating until `resume`. `in_flight`: accepted sequences keep their KV (`continue`),
    free it and recompute it (`recompute`), end with their present tokens (`abort`), or end first
    (`drain`). New requests `wait`, or get a 503 (`refuse`).
    """
    fields = {"in_flight": in_flight, "new_requests": new_requests, "clear_cache": clear_cache}
    return put("POST", "/engine/pause", fields, _state, repeatable=True)


def resume() -> Call[EngineState]:
    """Continue paused sequences and waiting requests."""
    return put("POST", "/engine/resume", {}, _state, repeatable=True)


def abort(*ids: str, all: bool = False) -> Call[AbortReply]:
    """End the items of these ids, or `all` open ones, with their present tokens; their replies say
    finish_reason "abort". Unknown ids are treated as finished.
    """
    fields = ({"ids": ids} if ids else {}) | ({"all": True} if all else {})
    return put("POST", "/engine/abort", fields, read_as(AbortReply), repeatable=not all)


def sleep(*memory: str, in_flight: str = "recompute") -> Call[EngineState]:
    """Free memory: "weights", "kv_cache", or without a name both. New requests are refused until
    all is awake. Accepted sequences then continue with the same tokens (`recompute`), end with
    their present tokens (`abort`), or end first (`drain`).
    """
    fields = {"memory": memory, "in_flight": in_flight}
    return put("POST", "/engine/sleep", fields, _state, repeatable=True)


def wake(*memory: str) -> Call[EngineState]:
    """Restore memory, with bit-identical weights; without a name all of it."""
    return put("POST", "/engine/wake", {"memory": memory}, _state, repeatable=True)


def clear_cache(*, unless_held: bool = False) -> Call[EngineState]:
    """Drop every cached prefix; running sequences keep their own KV. With `unless_held`, raise
    `Conflict` if sequences hold KV.
    """
    return put("POST", "/engine/clear_cache", {"unless_held": unless_held}, _state, repeatable=True)


# a fleet


def fleet() -> Call[FleetStatus]:
    """Return the state of every replica. `Conflict` if the server is not a gateway, as for the
    other operations of a fleet.
    """
    return Call("GET", "/fleet", _fleet, repeatable=True)


def drain_replica(name: str) -> Call[ReplicaStatus]:
    """Move a replica's sequences to others, and place none there until `resume_replica`."""
    return put("POST", f"/fleet/{in_path(name)}/drain", {}, _replica, repeatable=True)


def resume_replica(name: str) -> Call[ReplicaStatus]:
    """Place sequences at a drained replica again."""
    return put("POST", f"/fleet/{in_path(name)}/resume", {}, _replica, repeatable=True)


def restart_replica(name: str) -> Call[ReplicaStatus]:
    """Drain a replica and start its server again."""
    return put("POST", f"/fleet/{in_path(name)}/restart", {}, _replica)


def scale_fleet(replicas: int) -> Call[FleetStatus]:
    """Change the number of replicas; those that end are drained first."""
    return put("POST", "/fleet/replicas", {"replicas": replicas}, _fleet, repeatable=True)
