"""The process group of the dialect `vllm_rl`: how a trainer makes it, and the tensors that it then
broadcasts.

The trainer is rank 0 and hosts a TCPStore. The group is a gloo group directly on that store, or an
NCCL communicator whose id is in the store or comes with the call.
"""

from __future__ import annotations

import asyncio
import base64
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from tlt_server.errors import InvalidRequest
from tlt_server.frontend.http.fields import Tolerant
from tlt_server.frontend.weights.broadcasts import (
    Address,
    Backend,
    Broadcasts,
    Packing,
    Port,
    Rank,
    RanksOfGroup,
    Shapes,
    TensorNames,
    TypeNames,
    described,
)
from tlt_server.frontend.weights.session import Update, Version
from tlt_server.wire.commands import TensorEntry
from tlt_server.wire.events import WeightReport

GROUP = "weight_transfer"
MAX_UPDATES = 2**10  # broadcasts that one call may announce
ID_BYTES = 128  # size of an id of NCCL
BucketBytes = Annotated[
    int, "a bucket closes after the tensor that takes it over this", Meta(ge=1, le=2**40)
]


class InitInfo(RanksOfGroup, Tolerant, frozen=True, kw_only=True):
    """A group whose ranks from 1 on are servers'."""

    master_address: Annotated[
        Address | None, "where the store is, which rank 0 hosts; absent: there is none"
    ] = None  # type: ignore[assignment]
    master_port: Port = 0
    nccl_unique_id_b64: Annotated[
        str, "NCCL's id in base64, in place of address and port", Meta(max_length=256)
    ] = ""
    packed: Annotated[bool, "tensors come as raw bytes in buckets; false: one broadcast each"] = (
        False
    )
    packed_buffer_size_bytes: BucketBytes = 2**30

    def unique_id(self) -> bytes:
        """Return NCCL's id, decoded; empty where the store has it. Ranks meet either by the store
        or by the id, so exactly one of both must be given.
        """
        if bool(self.nccl_unique_id_b64) == bool(self.master_address):
            raise InvalidRequest(
                f"master_address is {self.master_address!r} and nccl_unique_id_b64 has "
                f"{len(self.nccl_unique_id_b64)} characters; give one of both: the store's address "
                "and port, or NCCL's id"
            )
        try:
            id = base64.b64decode(self.nccl_unique_id_b64, validate=True)
        except ValueError:
            id = b"?"
        if len(id) not in (0, ID_BYTES) or (id and self.backend != "nccl"):
            raise InvalidRequest(
                f"nccl_unique_id_b64 is {self.nccl_unique_id_b64[:40]!r} with backend "
                f"{self.backend}; give the {ID_BYTES} bytes of ncclGetUniqueId in ordinary base64, "
                "for backend nccl"
            )
        return id


class InitFields(Tolerant, frozen=True, kw_only=True):
    init_info: Annotated[InitInfo, "where the group is made, and who is in it"]


class BroadcasterFields(Tolerant, frozen=True, kw_only=True):
    """A group in which only servers are counted."""

    host: Address
    port: Port
    rank_offset: Rank = 0
    inference_world_size: Annotated[int, "servers in all", Meta(ge=1, le=65535)]
    backend: Annotated[Backend, Meta(extra_json_schema={"default": "nccl"})] | UnsetType = UNSET

    def info(self) -> InitInfo:
        if self.backend != "gloo":
            said = "absent, which means nccl" if self.backend is UNSET else "'nccl'"
            raise InvalidRequest(
                f"backend is {said}, and trainers that make this group over nccl describe what "
                "they send by pickles, which are not read; let the trainer write a directory and "
                "push it by weight_dir (prime-rl: weight_broadcast type filesystem), or make the "
                "group with "
                '"backend": "gloo" and describe tensors by update_info'
            )
        return InitInfo(
            master_address=self.host,
            master_port=self.port,
            rank_offset=self.rank_offset + 1,
            world_size=self.inference_world_size + 1,
            backend=self.backend,
        )


class UpdateInfo(Tolerant, frozen=True, kw_only=True):
    """Tensors, in the order in which they are broadcast."""

    names: Annotated[
        TensorNames, "as the checkpoint names them; the drafter's may begin with `draft.`"
    ]
    dtype_names: Annotated[TypeNames, 'as torch names them, such as "bfloat16"']
    shapes: Annotated[Shapes, "of the tensors"]
    packed: Annotated[bool | None, "absent: as the group was made"] = None
    packed_buffer_size_bytes: Annotated[BucketBytes | None, "absent: as the group was made"] = None

    def entries(self) -> list[TensorEntry]:
        return described(self.names, self.dtype_names, self.shapes)

    def packing(self, otherwise: Packing) -> Packing:
        return Packing(
            otherwise.packed if self.packed is None else self.packed,
            self.packed_buffer_size_bytes or otherwise.bucket_bytes,
        )


class UpdateFields(Tolerant, frozen=True, kw_only=True):
    """The body that announces a broadcast; other fields are ignored."""

    update_info: Annotated[
        UpdateInfo | Annotated[list[UpdateInfo], Meta(min_length=1, max_length=MAX_UPDATES)],
        "what is broadcast, or one after another several such",
    ]
    weight_version: Annotated[Version | None, "absent: the channel and the content's digest"] = None


class Transfer:
    def __init__(self, broadcasts: Broadcasts) -> None:
        self._broadcasts, self._packing = broadcasts, Packing()

    async def join(self, info: InitInfo) -> None:
        """Join the group, and leave one that was made before."""
        await self._broadcasts.join(GROUP, info, unique_id=info.unique_id())
        self._packing = Packing(info.packed, info.packed_buffer_size_bytes)

    async def push(self, update: Update, asked: UpdateFields) -> WeightReport:
        """Take all tensors that are announced, and return the last report."""
        infos = asked.update_info if isinstance(asked.update_info, list) else [asked.update_info]
        async with self._broadcasts.announced(GROUP):
            # All are checked before the first push, in a thread, since they may be many.
            pushes = await asyncio.to_thread(lambda: [info.entries() for info in infos])
        for info, entries in zip(infos, pushes, strict=True):
            report = await self._broadcasts.push(
                update,
                GROUP,
                entries,
                info.packing(self._packing),
                version=asked.weight_version or "",
            )
        return report
