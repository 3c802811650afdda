"""Bodies of the dialect `sglang` that concern weights: pushes, groups, adapters, reading."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from tlt_server.frontend.http.fields import Tolerant
from tlt_server.frontend.weights.adapters import AdapterName
from tlt_server.frontend.weights.broadcasts import (
    GroupName,
    Packing,
    RanksOfGroup,
    Shapes,
    TensorNames,
    TypeNames,
)
from tlt_server.frontend.weights.session import Directory, Selector, Version
from tlt_server.wire.commands import InFlight

GROUP = "weight_update_group"  # where a trainer names none


class BeginFields(Tolerant, frozen=True, kw_only=True):
    selector: Annotated[Selector, "the model whose weights are pushed"] = "target"


class PushFields(Tolerant, frozen=True, kw_only=True):
    """The fields that the pushes by all channels share."""

    abort_all_requests: Annotated[
        bool, "end running sequences with what they have; else they continue under the new weights"
    ] = False
    flush_cache: Annotated[
        bool, "accepted and without effect: KV of another version never serves a new request"
    ] = True

    @property
    def in_flight(self) -> InFlight:
        return "abort" if self.abort_all_requests else "continue"


class DiskFields(PushFields, frozen=True, kw_only=True):
    model_path: Annotated[
        Directory, "directory of safetensors, absolute or below the weight root", Meta(min_length=1)
    ]
    load_format: Annotated[Literal["auto", "safetensors"], "both mean safetensors"] = "auto"
    weight_version: Annotated[Version | None, "absent: the directory's name and digest"] = None


class SglangLoad(Tolerant, frozen=True, kw_only=True):
    lora_name: AdapterName
    lora_path: Annotated[
        Directory, "directory of the adapter, absolute or below the weight root", Meta(min_length=1)
    ]


class SglangUnload(Tolerant, frozen=True, kw_only=True):
    lora_name: AdapterName


class SglangGroup(RanksOfGroup, Tolerant, frozen=True, kw_only=True):
    group_name: GroupName = GROUP


class LeaveFields(Tolerant, frozen=True, kw_only=True):
    group_name: GroupName = GROUP


class GroupOf(Tolerant, frozen=True, kw_only=True):
    """The group of a body that may be wrong otherwise."""

    group_name: Any = GROUP


class DistributedFields(PushFields, frozen=True, kw_only=True):
    names: Annotated[
        TensorNames,
        "names of tensors, in the order in which they are broadcast; those of the drafter may "
        "begin with `draft.`",
    ]
    dtypes: Annotated[TypeNames, 'as torch names them, such as "bfloat16"']
    shapes: Annotated[Shapes, "shapes of the tensors"]
    group_name: GroupName = GROUP
    load_format: Annotated[
        Literal["flattened_bucket"] | None, "all come as one bucket of raw bytes; absent: one each"
    ] = None
    weight_version: Annotated[Version | None, "absent: the channel and the content's digest"] = None
    selector: Annotated[
        Selector | None, "whose weights these are; absent: those of POST /begin_weight_update"
    ] = None

    @property
    def packing(self) -> Packing:
        return Packing(packed=True, bucket_bytes=2**40) if self.load_format else Packing()


class ReadFields(Tolerant, frozen=True, kw_only=True):
    name: Annotated[
        str,
        "name of the tensor, as POST /weight_checker lists it",
        Meta(min_length=1, max_length=1024),
    ]
    truncate_size: Annotated[int, "the number of its first rows", Meta(ge=1, le=4096)] = 100
