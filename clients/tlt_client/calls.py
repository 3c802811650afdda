"""Operations of the server as values: a request, and how its reply is read. This module does no
I/O and reads no clock.

`Client` and `AsyncClient` send these values; an operation is written once, here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any, Generic, TypeVar, cast

import httpx
import msgspec

from tlt_client.arguments import check_finite, plain, version_of
from tlt_client.channels import CHANNELS
from tlt_client.errors import NotLive
from tlt_client.fields import GenerateBody, Item, SamplingFields
from tlt_client.responses import in_path, json_object, read_as, succeeded, whole_reply
from tlt_client.wire import (
    AbortReply,
    DrafterSamples,
    EngineState,
    Reply,
    RolloutList,
    RolloutReply,
    RolloutStatus,
    RolloutSummary,
    Weights,
)

Items = Sequence[Item | dict[str, Any]]
Fields = SamplingFields | dict[str, Any] | None
T = TypeVar("T")

_rollout_reply, _status, _list = read_as(RolloutReply), read_as(RolloutStatus), read_as(RolloutList)
_state = read_as(EngineState)


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


def _put(
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


def _body(
    items: Items,
    sampling: Fields,
    timeout_s: float | None,
    queue_timeout_s: float | None,
    priority: int,
    **how: bool,
) -> GenerateBody:
    items = list(items)
    for name, value in {
        "timeout_s": timeout_s,
        "queue_timeout_s": queue_timeout_s,
        "sampling": sampling,
        "requests": items,
    }.items():
        check_finite(name, value)
    return GenerateBody(
        requests=items,
        sampling=sampling if sampling is not None else msgspec.UNSET,
        timeout_s=timeout_s,
        queue_timeout_s=queue_timeout_s,
        priority=priority,
        **how,
    )


def _named(key: str | None) -> dict[str, str]:
    return {"idempotency-key": key} if key is not None else {}


def generate(
    items: Items,
    sampling: Fields,
    timeout_s: float | None,
    queue_timeout_s: float | None,
    priority: int,
    key: str | None,
) -> Call[Reply]:
    body = _body(items, sampling, timeout_s, queue_timeout_s, priority)
    return _put("POST", "/generate", body, whole_reply, _named(key), repeatable=key is not None)


def detach(
    items: Items,
    sampling: Fields,
    timeout_s: float | None,
    queue_timeout_s: float | None,
    priority: int,
    key: str | None,
) -> Call[str]:
    """Return a call whose value is the id of the rollout."""
    body = _body(items, sampling, timeout_s, queue_timeout_s, priority, detach=True)
    return _put(
        "POST",
        "/generate",
        body,
        lambda response: _status(response).id,
        _named(key),
        repeatable=key is not None,
    )


def stream(
    items: Items,
    sampling: Fields,
    timeout_s: float | None,
    queue_timeout_s: float | None,
    priority: int,
) -> Call[httpx.Response]:
    """Return a call whose value is the open response."""
    return _put(
        "POST",
        "/generate",
        _body(items, sampling, timeout_s, queue_timeout_s, priority, stream=True),
        succeeded,
        streams=True,
    )


# rollouts


def rollouts() -> Call[list[RolloutSummary]]:
    return Call("GET", "/rollouts", lambda response: _list(response).rollouts, repeatable=True)


def fetch(id: str, wait_s: float) -> Call[RolloutReply]:
    return Call(
        "GET",
        f"/rollouts/{in_path(id)}",
        _rollout_reply,
        params={"wait_s": wait_s},
        repeatable=True,
        wait_s=wait_s,
    )


def delete(id: str) -> Call[httpx.Response]:
    return Call("DELETE", f"/rollouts/{in_path(id)}", succeeded)


# the server


def ready() -> Call[bool]:
    return Call("GET", "/readyz", lambda response: response.is_success)


def server_info() -> Call[Mapping[str, Any]]:
    return Call("GET", "/server_info", json_object, repeatable=True)


def metrics() -> Call[str]:
    return Call("GET", "/metrics", lambda response: succeeded(response).text, repeatable=True)


def strategy() -> Call[Mapping[str, Any]]:
    return Call("GET", "/strategy", json_object, repeatable=True)


def drafter() -> Call[Mapping[str, Any]]:
    return Call("GET", "/drafter", json_object, repeatable=True)


def drafter_order(order: str, **fields: float | None) -> Call[Mapping[str, Any]]:
    """`order`: train, pause, resume or rollback."""
    repeatable = order in ("pause", "resume")
    given = {name: value for name, value in fields.items() if value is not None}
    return _put("POST", f"/drafter/{order}", given, json_object, repeatable=repeatable)


def export_drafter(name: str, layout: str) -> Call[Mapping[str, Any]]:
    return _put("POST", "/drafter/export", {"name": name, "layout": layout}, json_object)


def drafter_samples(after: int, limit: int) -> Call[DrafterSamples]:
    def read(response: httpx.Response) -> DrafterSamples:
        headers, content = succeeded(response).headers, response.content
        return DrafterSamples(
            content, int(headers["x-samples-after"]), int(headers["x-samples-left"])
        )

    params = {"after": after, "limit": limit}
    return Call("GET", "/drafter/samples", read, params=params, repeatable=True)


def load() -> Call[int]:
    return Call(
        "GET", "/load", lambda response: int(json_object(response)["server_load"]), repeatable=True
    )


def set_strategy(
    policy: str, strategy: str | None, arms: Sequence[str] | None, pins: Sequence[Mapping[str, Any]]
) -> Call[Mapping[str, Any]]:
    fields = {"strategy": strategy, "arms": arms, "pins": pins or None}
    given = {name: value for name, value in fields.items() if value is not None}
    return _put("PUT", "/strategy", {"policy": policy, **given}, json_object, repeatable=True)


# pauses and memory


def pause(in_flight: str, new_requests: str, clear_cache: bool) -> Call[EngineState]:
    fields = {"in_flight": in_flight, "new_requests": new_requests, "clear_cache": clear_cache}
    return _put("POST", "/engine/pause", fields, _state, repeatable=True)


def resume() -> Call[EngineState]:
    return _put("POST", "/engine/resume", {}, _state, repeatable=True)


def abort(ids: Sequence[str], everything: bool) -> Call[AbortReply]:
    fields = ({"ids": ids} if ids else {}) | ({"all": True} if everything else {})
    read = read_as(AbortReply)
    return _put("POST", "/engine/abort", fields, read, repeatable=not everything)


def sleep(memory: Sequence[str], in_flight: str) -> Call[EngineState]:
    fields = {"memory": memory, "in_flight": in_flight}
    return _put("POST", "/engine/sleep", fields, _state, repeatable=True)


def wake(memory: Sequence[str]) -> Call[EngineState]:
    return _put("POST", "/engine/wake", {"memory": memory}, _state, repeatable=True)


def clear_cache(unless_held: bool) -> Call[EngineState]:
    fields = {"unless_held": unless_held}
    return _put("POST", "/engine/clear_cache", fields, _state, repeatable=True)


# weights


def update_weights(
    path: str | PathLike[str], version: str, fields: Mapping[str, Any]
) -> Call[Mapping[str, Any]]:
    return push_weights(version, {"path": fspath(path), **fields})


def push_weights(version: str, fields: Mapping[str, Any]) -> Call[Mapping[str, Any]]:
    """Return a call that is repeatable if the channel is. It raises `NotLive` where the push ends
    staged and was to commit.
    """
    channel, commits = CHANNELS.get(str(fields.get("channel"))), fields.get("commit", True)

    def read(response: httpx.Response) -> Mapping[str, Any]:
        reply = json_object(response)
        if reply["state"] == "staged" and commits:
            raise NotLive(
                f"version {version!r} is staged, not live: a weight update is open on this server "
                "(GET /weights says since when; POST /finish_weight_update or /end_weight_update "
                "makes it live); end it, then push again, or push with commit=False"
            )
        return reply

    return _put(
        "POST",
        "/update_weights",
        {"version": version_of(version), **fields},
        read,
        repeatable=channel is None or channel.repeatable,
    )


def put_weights(
    version: str, part: str, data: bytes, start: int, total: int
) -> Call[Mapping[str, Any]]:
    headers = {
        "content-range": f"bytes {start}-{start + len(data) - 1}/{total}",
        "content-type": "application/octet-stream",
    }
    return Call(
        "PUT",
        f"/weights/{in_path(version_of(version))}/{in_path(part)}",
        json_object,
        data,
        headers,
        repeatable=True,
    )


def weights_part(version: str, part: str) -> Call[Mapping[str, Any]]:
    return Call("GET", f"/weights/{in_path(version)}/{in_path(part)}", json_object, repeatable=True)


def join_group(name: str, fields: Mapping[str, Any]) -> Call[Mapping[str, Any]]:
    return _put("POST", "/weight_groups", {"name": name, **fields}, json_object)


def leave_group(name: str) -> Call[Mapping[str, Any]]:
    return Call("DELETE", f"/weight_groups/{in_path(name)}", json_object, repeatable=True)


def commit_weights(version: str) -> Call[Mapping[str, Any]]:
    return _put("POST", f"/weights/{in_path(version)}/commit", {}, json_object, repeatable=True)


def abort_weights(version: str, upload_only: bool) -> Call[Mapping[str, Any]]:
    """Return a call that ends a push. With `upload_only` it follows another call's failure, which
    must not wait for it, so its wait is short.
    """
    path = f"/weights/{in_path(version)}/abort" if version else "/weights/abort"
    return _put(
        "POST",
        path,
        {"upload_only": True} if upload_only else {},
        json_object,
        within_s=10.0 if upload_only else None,
    )


def roll_back_weights(fields: Mapping[str, Any]) -> Call[Mapping[str, Any]]:
    return _put("POST", "/weights/rollback", fields, json_object, repeatable=bool(fields.get("to")))


def unload_adapter(name: str, in_flight: str) -> Call[Mapping[str, Any]]:
    path = f"/adapters/{in_path(name)}"
    return Call("DELETE", path, json_object, params={"in_flight": in_flight})


def weights() -> Call[Weights]:
    return Call(
        "GET", "/weights", lambda response: cast(Weights, json_object(response)), repeatable=True
    )


def weight_checksums(action: str) -> Call[Mapping[str, str]]:
    return _checked({"action": action}, "checksums")


def compare_weights(baseline: Mapping[str, str] | None) -> Call[list[str]]:
    given = {} if baseline is None else {"baseline": dict(baseline)}
    return _checked({"action": "compare", **given}, "mismatches")


def _checked(fields: Mapping[str, Any], name: str) -> Call[Any]:
    return _put(
        "POST",
        "/weight_checker",
        fields,
        lambda response: json_object(response)[name],
        repeatable=True,
    )
