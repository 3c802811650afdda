"""Bodies of the native weight routes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from tlt_server.commands import InFlight
from tlt_server.frontend.http.fields import Strict
from tlt_server.frontend.weights.broadcasts import (
    Address,
    Dimensions,
    Port,
    Rank,
    TensorName,
    WorldSize,
)
from tlt_server.frontend.weights.session import Version


class TensorFields(Strict):
    name: Annotated[
        TensorName,
        Field(
            description="the name in the checkpoint; with role all, the drafter's begin with "
            "`draft.`"
        ),
    ]
    dtype: Annotated[
        str, Field(max_length=40, description='as torch names it, such as "bfloat16"')
    ] = ""
    shape: Annotated[Dimensions | None, Field(description="absent: not compared")] = None
    checksum: Annotated[
        str,
        Field(
            max_length=80,
            description='"mix64:<hex>" of the values, or "sha256:<hex>" or "xxh3:<hex>" of the '
            "bytes pushed",
        ),
    ] = ""


class ManifestFields(Strict):
    version: Version
    path: Annotated[
        str | None,
        Field(
            min_length=1,
            description="by disk: directory of safetensors, absolute or below the weight root; by "
            "ipc: name of the socket that the engine makes in the directory `sockets` of GET "
            "/weights",
        ),
    ] = None
    role: Annotated[
        Literal["target", "drafter", "all"],
        Field(description="what is pushed; all: both in one transaction"),
    ] = "target"
    channel: Annotated[
        Literal["disk", "http", "broadcast", "ipc"],
        Field(
            description="how the tensors come: from a directory, from parts sent before, from a "
            "process group, or from memory of a process on the same host"
        ),
    ] = "disk"
    drafter_path: Annotated[
        str, Field(description="by disk with role all: the drafter's directory")
    ] = ""
    tensors: Annotated[
        list[TensorFields],
        Field(
            description="tensors that must come; empty: all that the model has. By http each with "
            "its checksum, by broadcast and ipc with dtype and shape, in the order they come"
        ),
    ] = []
    group: Annotated[
        str, Field(max_length=128, description="by broadcast: the group that brings them")
    ] = ""
    packed: Annotated[
        bool, Field(description="by broadcast: raw bytes in buckets; false: one broadcast each")
    ] = True
    bucket_bytes: Annotated[
        int,
        Field(
            ge=1, le=2**40, description="a bucket closes after the tensor that takes it over this"
        ),
    ] = 2**30
    partial: Annotated[
        bool,
        Field(
            description="by broadcast: `tensors` are some of the model's; calls of the same "
            "version bring the others, and the call that brings the last of them ends the push"
        ),
    ] = False
    in_flight: Annotated[
        InFlight, Field(description="what becomes of running requests when the target changes")
    ] = "continue"
    commit: Annotated[
        bool, Field(description="false: stay staged until POST /weights/{version}/commit")
    ] = True


class DirectoryFields(BaseModel):
    """The form of trainers with a shared disk; other fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    weight_dir: Annotated[
        str,
        Field(
            min_length=1, description="directory of safetensors, absolute or below the weight root"
        ),
    ]
    weight_version: Annotated[
        Version | None, Field(description="absent: the directory's name and digest")
    ] = None
    version: Annotated[
        Version | None, Field(description="the same, where weight_version is absent")
    ] = None


class GroupFields(Strict):
    """A process group whose rank 0, a trainer, hosts the store."""

    name: Annotated[
        str,
        Field(
            min_length=1,
            max_length=128,
            pattern=r"^[A-Za-z0-9._-]+$",
            description="the name that pushes call it by",
        ),
    ]
    master_address: Address
    master_port: Port
    rank_offset: Rank = 1
    world_size: WorldSize
    backend: Annotated[Literal["gloo", "nccl"], Field(description="gloo on CPUs, nccl on GPUs")] = (
        "gloo"
    )
    prefixed: Annotated[
        bool,
        Field(
            description="keys of the store begin with the group's name, as torch stores them for "
            "named groups"
        ),
    ] = False


class RollbackFields(Strict):
    to: Annotated[
        str,
        Field(
            description="the previous version, of the target, the drafter or both, that is to be "
            "live after the call; makes a repeated call safe. Absent: undo the last commit, of the "
            "models that it changed"
        ),
    ] = ""
    in_flight: Annotated[
        InFlight, Field(description="what becomes of running requests when the target changes")
    ] = "continue"


class PushAbort(Strict):
    """The extent of what an abort ends; the body may be left out."""

    upload_only: Annotated[
        bool, Field(description="end only what has come by http and is not being pushed")
    ] = False
