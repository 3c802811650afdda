"""The process group of the dialect `vllm_rl`: how a trainer makes it, and the tensors that it then broadcasts.

The trainer is rank 0 and hosts a TCPStore; the group is a gloo group laid straight upon that store. Its NCCL communicator is not joined:
the id of one is exchanged there as a pickle.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tlt_server.errors import InvalidRequest
from tlt_server.frontend.broadcasts import Address, Broadcasts, Dimensions, Packing, Port, Rank, WorldSize, described
from tlt_server.frontend.weight_session import Version
from tlt_server.records import TensorEntry, WeightReport

GROUP = "weight_transfer"
Backend = Annotated[Literal["gloo", "nccl"], Field(description="gloo; without it a trainer means nccl, which is refused")]
BucketBytes = Annotated[int, Field(ge=1, le=2**40, description="a bucket closes after the tensor that takes it over this")]


class Lenient(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class InitInfo(Lenient):
    """A group whose ranks from 1 on are servers'."""

    master_address: Address
    master_port: Port
    rank_offset: Rank = 1
    world_size: WorldSize
    backend: Backend = "nccl"
    packed: Annotated[bool, Field(description="tensors come as raw bytes in buckets; false: one broadcast each")] = False
    packed_buffer_size_bytes: BucketBytes = 2**30


class InitFields(Lenient):
    init_info: Annotated[InitInfo, Field(description="where the group is made, and who is in it")]


class BroadcasterFields(Lenient):
    """A group in which only servers are counted."""

    host: Address
    port: Port
    rank_offset: Rank = 0
    inference_world_size: Annotated[int, Field(ge=1, le=65535, description="servers in all")]
    backend: Backend = "nccl"

    def info(self) -> InitInfo:
        return InitInfo(master_address=self.host, master_port=self.port, rank_offset=self.rank_offset + 1,
                        world_size=self.inference_world_size + 1, backend=self.backend)


class UpdateInfo(Lenient):
    """Tensors, in the order in which they are broadcast."""

    names: Annotated[list[str], Field(description="as the checkpoint names them; the drafter's may begin with `draft.`")]
    dtype_names: Annotated[list[str], Field(description='as torch names them, such as "bfloat16"')]
    shapes: Annotated[list[Dimensions], Field(description="of the tensors")]
    packed: Annotated[bool | None, Field(description="absent: as the group was made")] = None
    packed_buffer_size_bytes: Annotated[BucketBytes | None, Field(description="absent: as the group was made")] = None

    def entries(self) -> list[TensorEntry]:
        return described(self.names, self.dtype_names, self.shapes)

    def packing(self, otherwise: Packing) -> Packing:
        return Packing(otherwise.packed if self.packed is None else self.packed, self.packed_buffer_size_bytes or otherwise.bucket_bytes)


def _listed(one_or_several: Any) -> Any:
    return one_or_several if isinstance(one_or_several, list) else [one_or_several]


class UpdateFields(Lenient):
    """What trainers say beside a broadcast; other fields are ignored."""

    update_info: Annotated[list[UpdateInfo], Field(min_length=1, description="what is broadcast, or one after another several such"),
                           BeforeValidator(_listed, json_schema_input_type=UpdateInfo | list[UpdateInfo])]
    weight_version: Annotated[Version | None, Field(description="absent: the channel and the content's digest")] = None


class Transfer:
    def __init__(self, broadcasts: Broadcasts) -> None:
        self._broadcasts, self._packing = broadcasts, Packing()

    async def join(self, info: InitInfo) -> None:
        """A group made before is left."""
        if info.backend != "gloo":
            raise InvalidRequest('backend is nccl, and that communicator\'s id is exchanged as a pickle, which this server does not read; '
                                 'make the group with "backend": "gloo", or push a directory by weight_dir')
        await self._broadcasts.join(GROUP, info.backend, info.master_address, info.master_port, info.rank_offset, info.world_size)
        self._packing = Packing(info.packed, info.packed_buffer_size_bytes)

    async def update(self, asked: UpdateFields) -> WeightReport:
        """Returns once all of these tensors have come; how things stand then."""
        pushes = [(info.entries(), info.packing(self._packing)) for info in asked.update_info]  # before any is begun
        for entries, packing in pushes:
            report = await self._broadcasts.push(GROUP, entries, packing, version=asked.weight_version or "")
        return report
