"""The body of `POST /update_weights`, in one of its forms, as a manifest that the engine can try.

`weight_dir` is what trainers with a shared disk send, `update_info` what those send that broadcast
to the group of the dialect `vllm_rl`; anything else is the native manifest.
"""

from __future__ import annotations

from typing import Any

from tlt_server.errors import InvalidRequest
from tlt_server.frontend.dialects.weights.requests import DirectoryFields, ManifestFields
from tlt_server.frontend.http.fields import checked
from tlt_server.frontend.weights.transfer import GROUP
from tlt_server.records import Manifest, Role, TensorEntry

NEEDS = {  # channel -> fields of its manifest
    "disk": ("path",),
    "http": ("tensors",),
    "broadcast": ("group", "tensors"),
    "ipc": ("path", "tensors"),
}


TAKEN_BY = {
    "path": ("disk", "ipc"),
    "drafter_path": ("disk",),
    "group": ("broadcast",),
}  # field -> channels, where not all take it


def group_of(body: dict[str, Any]) -> object:
    """That brings what this body is about, if one does; what update_info says is `Transfer`'s."""
    return body.get(
        "group", GROUP if body.get("weight_dir", "") is None and "version" not in body else ""
    )


def without_null_forms(body: dict[str, Any]) -> dict[str, Any]:
    """Null is the same as absent for the keys that say which form it is, where another form is
    left.
    """
    if body.get("weight_dir", "") is None and not body.get("update_info") and "version" not in body:
        raise InvalidRequest(
            "weight_dir is null, by which a trainer means what it sends through the group of POST /init_broadcaster, and "
            "no tensors are described; let it name a directory below the weight root (prime-rl: weight_broadcast type "
            "filesystem), or describe the tensors by update_info"
        )
    return {
        name: value
        for name, value in body.items()
        if value is not None or name not in ("weight_dir", "update_info")
    }


def manifest_of(body: dict[str, Any], role: Role) -> Manifest:
    """A push that the engine can try, or `InvalidRequest`. `role`: of a form that does not say it."""
    if "weight_dir" in body:
        if not body["weight_dir"]:
            raise InvalidRequest(
                f"weight_dir is {body['weight_dir']!r}; name a directory below the weight root"
            )
        directory = checked(DirectoryFields, body)
        return Manifest(
            role=role,
            version=directory.weight_version or directory.version or "",
            path=directory.weight_dir,
        )
    asked = checked(ManifestFields, body)
    for name in NEEDS[asked.channel]:
        if not getattr(asked, name):
            raise InvalidRequest(
                f"{name} is missing; channel {asked.channel} needs {' and '.join(NEEDS[asked.channel])}"
            )
    for name, channels in TAKEN_BY.items():
        if getattr(asked, name) and asked.channel not in channels:
            raise InvalidRequest(
                f"{name} is {getattr(asked, name)[:80]!r}, which channel {asked.channel} does not take; leave it out"
            )
    if asked.partial and asked.channel != "broadcast":
        raise InvalidRequest(
            f"partial is true, which channel {asked.channel} does not take; leave it out and name all tensors"
        )
    unsaid = [
        t.name
        for t in asked.tensors
        if not (t.checksum if asked.channel == "http" else t.dtype and t.shape is not None)
    ]
    if unsaid and asked.channel != "disk":
        wanted = "checksum" if asked.channel == "http" else "dtype and shape"
        raise InvalidRequest(
            f"tensor {unsaid[0][:80]!r} has no {wanted}; channel {asked.channel} needs them of every tensor"
        )
    if asked.channel == "disk" and (asked.role == "all") != bool(asked.drafter_path):
        raise InvalidRequest(
            f"role is {asked.role!r} and drafter_path is {asked.drafter_path[:80]!r}; "
            "role all needs path (the target's) and drafter_path, other roles only path"
        )
    tensors = [
        TensorEntry(name=t.name, dtype=t.dtype, shape=t.shape, checksum=t.checksum)
        for t in asked.tensors
    ]
    return Manifest(
        role=asked.role,
        version=asked.version,
        channel=asked.channel,
        path=asked.path or "",
        drafter_path=asked.drafter_path,
        tensors=tensors,
        group=asked.group,
        packed=asked.packed,
        bucket_bytes=asked.bucket_bytes,
        partial=asked.partial,
        in_flight=asked.in_flight,
        commit=asked.commit,
    )
