"""The translation of a body of `POST /update_weights`, in one of its forms, to a manifest.

Trainers with a shared disk send `weight_dir`, and trainers that broadcast to the group of the
dialect `vllm_rl` send `update_info`; any other body is the native manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, to_builtins

from tlt_client.arguments import ADAPTER_MUST, is_adapter
from tlt_client.channels import CHANNELS
from tlt_client.channels.checkpoint import ADAPTER_CONFIG
from tlt_client.channels.errors import ChannelError
from tlt_client.channels.source import Source
from tlt_server.errors import InvalidRequest
from tlt_server.frontend.dialects.weights.requests import DirectoryFields, ManifestFields
from tlt_server.frontend.http.fields import shown
from tlt_server.frontend.http.parsing import Forms
from tlt_server.frontend.weights.broadcasts import GROUP, UpdateFields
from tlt_server.wire.commands import Manifest, Role, TensorEntry

if TYPE_CHECKING:  # pydantic takes time to load, and the reading process needs none
    from tlt_server.config import ResolvedConfig

OWN = ("path", "drafter_path", "group")  # each is for some channels only


class OwnGroup(Struct, frozen=True):
    """The group that brings the tensors of a body, which may be wrong otherwise."""

    group: Any = ""


class TransferGroup(Struct, frozen=True):
    """A body whose tensors come through the group of the dialect `vllm_rl`."""

    @property
    def group(self) -> str:
        return GROUP


def _announces(null: Mapping[str, bool]) -> type[OwnGroup] | type[TransferGroup]:
    transfer = null.get("update_info") is False or (
        null.get("weight_dir") is True and "version" not in null
    )
    return TransferGroup if transfer else OwnGroup


def _form(
    null: Mapping[str, bool],
) -> type[ManifestFields] | type[DirectoryFields] | type[UpdateFields]:
    if null.get("update_info") is False:
        return UpdateFields
    if null.get("weight_dir") is True and "version" not in null:
        raise InvalidRequest(
            "weight_dir is null, by which a trainer means what it sends through the group of POST "
            "/init_broadcaster, and no tensors are described; let it name a directory below the "
            "weight root (prime-rl: weight_broadcast type filesystem), or describe the tensors by "
            "update_info"
        )
    return DirectoryFields if null.get("weight_dir") is False else ManifestFields


_NAMES = ("weight_dir", "update_info", "version")
ANNOUNCED = Forms(_NAMES, _announces)
PUSH = Forms(_NAMES, _form)


def manifest_of(
    asked: ManifestFields | DirectoryFields, role: Role, config: ResolvedConfig
) -> Manifest:
    """Return a push that the engine can try, or raise `InvalidRequest`.

    `role` is that of a form that does not name it. An adapter that comes so has no name, so it gets
    the model's: requests that name the model have it.
    """
    if isinstance(asked, DirectoryFields):
        if not asked.weight_dir:
            raise InvalidRequest("weight_dir is ''; name a directory below the weight root")
        adapted = _holds_adapter(config.weight_root, asked.weight_dir)
        if adapted and not is_adapter(config.served_model_name):
            raise InvalidRequest(
                f"served_model_name is {shown(config.served_model_name)}, which an adapter by "
                f"weight_dir has for its name; it must {ADAPTER_MUST}: start the server with "
                "another, or give the adapter a name by POST /load_lora_adapter"
            )
        return Manifest(
            role="adapter" if adapted else role,
            adapter=config.served_model_name if adapted else "",
            version=asked.weight_version or asked.version or "",
            labelled=True,
            path=asked.weight_dir,
        )
    _check_fields(asked)
    _check_tensors(asked)
    _check_adapter(asked)
    return Manifest(
        role=asked.role,
        version=asked.version,
        channel=asked.channel,
        path=asked.path or "",
        drafter_path=asked.drafter_path,
        tensors=[
            TensorEntry(name=t.name, dtype=t.dtype, shape=t.shape, checksum=t.checksum)
            for t in asked.tensors
        ],
        group=asked.group,
        packed=asked.packed,
        bucket_bytes=asked.bucket_bytes,
        partial=asked.partial,
        in_flight=asked.in_flight,
        commit=asked.commit,
        adapter=asked.adapter or "",
        adapter_config=to_builtins(asked.adapter_config) if asked.adapter_config else {},
    )


def _holds_adapter(root: Path | None, directory: str) -> bool:
    """Return True if a directory holds a LoRA adapter. One that cannot be read is refused later."""
    try:
        return root is not None and Source(root, directory).has(ADAPTER_CONFIG)
    except (ChannelError, OSError):
        return False


def _check_fields(asked: ManifestFields) -> None:
    """Check that the channel has the fields that it needs and no others."""
    channel = CHANNELS[asked.channel]
    for name in channel.needs:
        if not getattr(asked, name):
            raise InvalidRequest(
                f"{name} is missing; channel {asked.channel} needs {' and '.join(channel.needs)}"
            )
    for name in OWN:
        if getattr(asked, name) and name not in channel.needs + channel.takes:
            raise InvalidRequest(
                f"{name} is {getattr(asked, name)[:80]!r}, which channel {asked.channel} does not "
                "take; leave it out"
            )
    if asked.partial and "partial" not in channel.takes:
        raise InvalidRequest(
            f"partial is true, which channel {asked.channel} does not take; leave it out and name "
            "all tensors"
        )


def _check_adapter(asked: ManifestFields) -> None:
    """Check that an adapter, and nothing else, has a name and, where no file says it, a config."""
    pushes, configured = asked.role == "adapter", asked.adapter_config is not None
    if pushes != (asked.adapter is not None):
        raise InvalidRequest(
            f"role is {asked.role!r} and adapter is {'given' if asked.adapter else 'absent'}; role "
            "adapter needs it, other roles do not take it"
        )
    if configured != (pushes and not CHANNELS[asked.channel].reads_directories):
        raise InvalidRequest(
            f"role is {asked.role!r}, the channel {asked.channel} and adapter_config is "
            f"{'given' if configured else 'absent'}; an adapter needs it on channels other than "
            "disk, which has adapter_config.json, and nothing else takes it"
        )
    if pushes and asked.partial:
        raise InvalidRequest(
            "partial is true, which role adapter does not take; name all tensors in one call"
        )


def _check_tensors(asked: ManifestFields) -> None:
    """Check that each tensor is described as the channel needs, and each role has its path."""
    channel = CHANNELS[asked.channel]
    for tensor in asked.tensors:
        if any(getattr(tensor, field) in ("", None) for field in channel.describes):
            raise InvalidRequest(
                f"tensor {tensor.name[:80]!r} has no {' and '.join(channel.describes)}; channel "
                f"{asked.channel} needs them of every tensor"
            )
    if channel.reads_directories and (asked.role == "all") != bool(asked.drafter_path):
        raise InvalidRequest(
            f"role is {asked.role!r} and drafter_path is {asked.drafter_path[:80]!r}; "
            "role all needs path (the target's) and drafter_path, other roles only path"
        )
