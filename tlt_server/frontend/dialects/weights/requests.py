"""Bodies of the native weight routes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct, to_builtins

from tlt_client.arguments import ADAPTER_MUST, MAX_VERSION, is_adapter
from tlt_client.channels import CHANNELS
from tlt_client.channels.checkpoint import ADAPTER_CONFIG
from tlt_client.channels.errors import ChannelError
from tlt_client.channels.source import Source
from tlt_client.fields import MAX_INT32
from tlt_server.errors import InvalidRequest
from tlt_server.frontend.http.fields import Strict, Tolerant, shown
from tlt_server.frontend.http.parsing import Forms
from tlt_server.frontend.weights.adapters import AdapterName
from tlt_server.frontend.weights.broadcasts import (
    GROUP,
    MAX_TENSORS,
    Dimensions,
    RanksOfGroup,
    TensorName,
    UpdateFields,
)
from tlt_server.frontend.weights.session import Directory, Version
from tlt_server.wire.commands import InFlight, Manifest, Role, TensorEntry

if TYPE_CHECKING:
    from tlt_server.config import ResolvedConfig

if TYPE_CHECKING:
    ChannelName = str
else:
    ChannelName = Literal[tuple(CHANNELS)]

ModuleName = Annotated[str, Meta(max_length=1024)]  # PEFT's: an end of a path, or a pattern
OWN = ("path", "drafter_path", "group")  # each is for some channels only
_NAMES = ("weight_dir", "update_info", "version")


class TensorFields(Strict, frozen=True, kw_only=True):
    name: Annotated[
        TensorName, "the name in the checkpoint; with role all, the drafter's begin with `draft.`"
    ]
    dtype: Annotated[str, 'as torch names it, such as "bfloat16"', Meta(max_length=40)] = ""
    shape: Annotated[Dimensions | None, "absent: not compared"] = None
    checksum: Annotated[
        str,
        '"mix64:<hex>" of the values, or "sha256:<hex>" or "xxh3:<hex>" of the bytes pushed',
        Meta(max_length=80),
    ] = ""


class AdapterFields(Strict, frozen=True, kw_only=True):
    """The fields of PEFT's adapter_config.json that this server reads."""

    r: Annotated[int, "rank", Meta(ge=1, le=MAX_INT32)]
    lora_alpha: Annotated[float, "the scale is this by the rank"]
    use_rslora: Annotated[bool, "the scale is lora_alpha by the root of the rank"] = False
    target_modules: Annotated[
        Annotated[list[ModuleName], Meta(max_length=16384)] | ModuleName | None,
        "names of linear maps that must come; those whose tensors come are adapted in any case, so "
        "that it may be a pattern, or absent",
    ] = None


class ManifestFields(Strict, frozen=True, kw_only=True):
    version: Version
    path: Annotated[
        Annotated[Directory, Meta(min_length=1)] | None,
        "by disk: directory of safetensors, absolute or below the weight root; by ipc: name of the "
        "socket that the engine makes in the directory `sockets` of GET /weights",
    ] = None
    role: Annotated[
        Literal["target", "drafter", "all", "adapter"],
        "what is pushed; all: target and drafter in one transaction; adapter: a LoRA adapter of "
        "the target",
    ] = "target"
    adapter: Annotated[AdapterName | None, "with role adapter: the name that requests give it"] = (
        None
    )
    adapter_config: Annotated[
        AdapterFields | None,
        "with role adapter: what adapter_config.json says, where the channel is not disk",
    ] = None
    channel: Annotated[
        ChannelName,
        "how the tensors come: from a directory, from parts sent before, from a process group, or "
        "from memory of a process on the same host",
    ] = "disk"
    drafter_path: Annotated[Directory, "by disk with role all: the drafter's directory"] = ""
    tensors: Annotated[
        list[TensorFields],
        "tensors that must come; empty: all that the model has. By http each with its checksum, by "
        "broadcast and ipc with dtype and shape, in the order they come",
        Meta(max_length=MAX_TENSORS),
    ] = []
    group: Annotated[str, "by broadcast: the group that brings them", Meta(max_length=128)] = ""
    packed: Annotated[bool, "by broadcast: raw bytes in buckets; false: one broadcast each"] = True
    bucket_bytes: Annotated[
        int, "a bucket closes after the tensor that takes it over this", Meta(ge=1, le=2**40)
    ] = 2**30
    partial: Annotated[
        bool,
        "by broadcast: `tensors` are some of the model's; calls of the same version bring the "
        "others, and the call that brings the last of them ends the push",
    ] = False
    in_flight: Annotated[InFlight, "what becomes of running requests when the target changes"] = (
        "continue"
    )
    commit: Annotated[bool, "false: stay staged until POST /weights/{version}/commit"] = True


class DirectoryFields(Tolerant, frozen=True, kw_only=True):
    """The form of trainers with a shared disk; other fields are ignored."""

    weight_dir: Annotated[
        Directory,
        "directory of safetensors, absolute or below the weight root",
        Meta(extra_json_schema={"minLength": 1}),
    ]
    weight_version: Annotated[Version | None, "absent: the directory's name and digest"] = None
    version: Annotated[Version | None, "the same, where weight_version is absent"] = None


class GroupFields(RanksOfGroup, Strict, frozen=True, kw_only=True):
    """A process group whose rank 0, a trainer, hosts the store."""

    name: Annotated[
        str,
        "the name that pushes call it by",
        Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._-]+$"),
    ]
    backend: Annotated[Literal["gloo", "nccl"], "gloo on CPUs, nccl on GPUs"] = "gloo"
    prefixed: Annotated[
        bool, "keys of the store begin with the group's name, as torch stores them for named groups"
    ] = False


class RollbackFields(Strict, frozen=True, kw_only=True):
    to: Annotated[
        str,
        "the previous version that is to be live after the call; makes a repeated call safe. Of a "
        "name that the target has had, the target's must be live or kept; the drafter's goes back "
        "with it where it is kept. Absent: undo the last push, of the models that it changed",
        Meta(max_length=MAX_VERSION),
    ] = ""
    role: Annotated[Role | None, "the one model to roll back; absent: as `to` says"] = None
    in_flight: Annotated[InFlight, "what becomes of running requests when the target changes"] = (
        "continue"
    )


class PushAbort(Strict, frozen=True, kw_only=True):
    """The scope of an abort; the body may be left out."""

    upload_only: Annotated[bool, "end only what has come by http and is not being pushed"] = False


class OwnGroup(Struct, frozen=True):
    """The group that brings a body's tensors, even if other fields are wrong."""

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
            "weight_dir is null, which refers to tensors sent through the group of POST "
            "/init_broadcaster, but none are described; let it name a directory below the weight "
            "root (prime-rl: weight_broadcast type filesystem), or describe the tensors by "
            "update_info"
        )
    return DirectoryFields if null.get("weight_dir") is False else ManifestFields


ANNOUNCED = Forms(_NAMES, _announces)
PUSH = Forms(_NAMES, _form)


def manifest_of(
    asked: ManifestFields | DirectoryFields, role: Role, config: ResolvedConfig
) -> Manifest:
    """Return a push that the engine can try, or raise `InvalidRequest`.

    `role`: of a form that does not name it. An adapter in such a form has no name, so it gets the
    model's: requests that name the model use it.
    """
    if isinstance(asked, DirectoryFields):
        if not asked.weight_dir:
            raise InvalidRequest("weight_dir is ''; name a directory below the weight root")
        adapted = _holds_adapter(config.weight_root, asked.weight_dir)
        if adapted and not is_adapter(config.served_model_name):
            raise InvalidRequest(
                f"served_model_name is {shown(config.served_model_name)}, and an adapter pushed "
                f"by weight_dir takes this name; an adapter's name must {ADAPTER_MUST}: start the "
                "server with another served_model_name, or load the adapter under its own name "
                "with POST /load_lora_adapter"
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
    """Return True if a directory holds a LoRA adapter. An unreadable one is refused later."""
    try:
        return root is not None and Source(root, directory).has(ADAPTER_CONFIG)
    except (ChannelError, OSError):
        return False


def _check_fields(asked: ManifestFields) -> None:
    """Check that the channel has exactly the fields that it needs."""
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
    """Check that only an adapter has a name and, unless a file has it, a config."""
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
    """Check that each tensor is described as the channel requires, and each role has its path."""
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
