"""Operations on weights: pushes by any channel, groups, versions, adapters, checksums."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any, cast

import httpx

from tlt_client.arguments import version_of
from tlt_client.calls import Call, put
from tlt_client.channels import CHANNELS
from tlt_client.errors import NotLive
from tlt_client.responses import in_path, json_object
from tlt_client.wire import Weights


def update_weights(
    path: str | PathLike[str], version: str, **fields: Any
) -> Call[Mapping[str, Any]]:
    """Push the safetensors directory `path`, below the server's weight root; return once it is live
    (or staged, or refused).

    `fields`: further fields of the manifest: `role`, `drafter_path`, `tensors`, `in_flight`
    (continue, recompute, abort, drain), `commit`.
    """
    return push_weights(version, path=fspath(path), **fields)


def push_weights(version: str, **fields: Any) -> Call[Mapping[str, Any]]:
    """Push by the channel in the manifest's `fields`; `tlt_client.channels` sends the tensors.
    Raise `NotLive` if the push ends staged although it should commit.
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

    return put(
        "POST",
        "/update_weights",
        {"version": version_of(version), **fields},
        read,
        repeatable=channel is None or channel.repeatable,
    )


def put_weights(
    version: str, part: str, data: bytes, *, start: int, total: int
) -> Call[Mapping[str, Any]]:
    """Send bytes `[start, start + len(data))` of a part of a version; the reply has the number of
    bytes received.
    """
    headers = {
        "content-range": f"bytes {start}-{start + len(data) - 1}/{total}",
        "content-type": "application/octet-stream",
    }
    path = f"/weights/{in_path(version_of(version))}/{in_path(part)}"
    return Call("PUT", path, json_object, data, headers, repeatable=True)


def weights_part(version: str, part: str) -> Call[Mapping[str, Any]]:
    """Return how much of a part the server has received."""
    return Call("GET", f"/weights/{in_path(version)}/{in_path(part)}", json_object, repeatable=True)


def join_group(name: str, **fields: Any) -> Call[Mapping[str, Any]]:
    """Let the server join the process group `name`; return once all ranks have joined. `fields`:
    `master_address`, `master_port`, `rank_offset`, `world_size`, `backend`, `prefixed`.
    """
    return put("POST", "/weight_groups", {"name": name, **fields}, json_object)


def leave_group(name: str) -> Call[Mapping[str, Any]]:
    """Let the server leave a process group."""
    return Call("DELETE", f"/weight_groups/{in_path(name)}", json_object, repeatable=True)


def commit_weights(version: str) -> Call[Mapping[str, Any]]:
    """Make a push live that was staged with `commit=False`; its state is `unchanged` if the version
    is already live.
    """
    return put("POST", f"/weights/{in_path(version)}/commit", {}, json_object, repeatable=True)


def abort_weights(version: str = "", *, upload_only: bool = False) -> Call[Mapping[str, Any]]:
    """End the push of this version or, without a version, the open one, before it is committed;
    live weights do not change. With `upload_only`, drop only the version's parts uploaded by http
    that are not being pushed.
    """
    path = f"/weights/{in_path(version)}/abort" if version else "/weights/abort"
    if upload_only:  # follows another call's failure, which must not wait long for it
        return put("POST", path, {"upload_only": True}, json_object, within_s=10.0)
    return put("POST", path, {}, json_object)


def roll_back_weights(**fields: Any) -> Call[Mapping[str, Any]]:
    """Undo the last push. With `to`, make that version live again, so that a repeated call is safe;
    `role` rolls back only the target or the drafter.
    """
    return put("POST", "/weights/rollback", fields, json_object, repeatable=bool(fields.get("to")))


def weights() -> Call[Weights]:
    """Return the live versions, the versions for a rollback, open pushes and uploads."""
    return Call(
        "GET", "/weights", lambda response: cast(Weights, json_object(response)), repeatable=True
    )


def unload_adapter(name: str, in_flight: str = "drain") -> Call[Mapping[str, Any]]:
    """Unload a LoRA adapter once its requests have ended, or with `abort` end them with their
    present tokens. `NotFound` if it is not loaded.
    """
    path = f"/adapters/{in_path(name)}"
    return Call("DELETE", path, json_object, params={"in_flight": in_flight})


def weight_checksums() -> Call[Mapping[str, str]]:
    """Return the mix64 checksum of every live tensor (`tlt_client.channels.checksums`)."""
    return _checked("checksums", action="checksum")


def remember_weight_checksums() -> Call[Mapping[str, str]]:
    """Return the same checksums; the server remembers them for `compare_weights`."""
    return _checked("checksums", action="snapshot")


def compare_weights(baseline: Mapping[str, str] | None = None) -> Call[list[str]]:
    """Return the names of tensors that differ from a `baseline` of checksums or, without one, from
    the checksums that the server remembers.
    """
    given = {} if baseline is None else {"baseline": dict(baseline)}
    return _checked("mismatches", action="compare", **given)


def _checked(name: str, **fields: Any) -> Call[Any]:
    def read(response: httpx.Response) -> Any:
        return json_object(response)[name]

    return put("POST", "/weight_checker", fields, read, repeatable=True)
