"""Bodies of the native weight routes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from tlt_client.arguments import MAX_VERSION
from tlt_client.channels import CHANNELS
from tlt_client.fields import MAX_INT32
from tlt_server.frontend.http.fields import Strict, Tolerant
from tlt_server.frontend.weights.adapters import AdapterName
from tlt_server.frontend.weights.broadcasts import MAX_TENSORS, Dimensions, RanksOfGroup, TensorName
from tlt_server.frontend.weights.session import Directory, Version
from tlt_server.wire.commands import InFlight, Role

if TYPE_CHECKING:
    ChannelName = str
else:
    ChannelName = Literal[tuple(CHANNELS)]

ModuleName = Annotated[str, Meta(max_length=1024)]  # PEFT's: an end of a path, or a pattern


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
    """The fields of PEFT's adapter_config.json that are read."""

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
    """The extent of what an abort ends; the body may be left out."""

    upload_only: Annotated[bool, "end only what has come by http and is not being pushed"] = False
