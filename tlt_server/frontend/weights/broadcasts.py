"""Process groups of trainers with this server, and the tensors that they announce through them, in
any dialect.

A trainer names some tensors per call, in the order in which it broadcasts them; a version is
complete when none is missing. The engine joins, receives and checks
(`tlt_client.channels.broadcast`); calls become its commands here. Only the caller waits.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Literal, NamedTuple

from msgspec import UNSET, Meta, Struct, UnsetType

from tlt_client.arguments import SEEN
from tlt_client.channels import DRAFTER_PREFIX
from tlt_client.channels.files import MAX_DIMENSION, MAX_DIMENSIONS, MAX_NAME
from tlt_server.errors import InvalidRequest, TltError
from tlt_server.frontend.http.fields import Tolerant
from tlt_server.frontend.weights.session import Selector, Update, Version, WeightSession
from tlt_server.wire.commands import (
    InFlight,
    JoinGroup,
    LeaveGroup,
    Manifest,
    PushRole,
    TensorEntry,
)
from tlt_server.wire.events import WeightReport

GroupName = Annotated[str, "of the process group", Meta(min_length=1, max_length=128, pattern=SEEN)]
Address = Annotated[
    str, "where the store is, which rank 0 hosts", Meta(min_length=1, max_length=256)
]
Port = Annotated[
    Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | Annotated[str, Meta(max_length=16)],
    "its port; a string of digits will do",
]
Rank = Annotated[int, "the server's rank", Meta(ge=0, le=65535)]
Backend = Annotated[Literal["gloo", "nccl"], "gloo on CPUs; without it a trainer means nccl"]
WorldSize = Annotated[int, "ranks in all", Meta(ge=2, le=65536)]
TensorName = Annotated[str, Meta(max_length=MAX_NAME)]
Dimensions = Annotated[
    list[Annotated[int, Meta(ge=0, le=MAX_DIMENSION)]], Meta(max_length=MAX_DIMENSIONS)
]


class RanksOfGroup(Struct, frozen=True, kw_only=True):
    """The ranks of a process group, and their meeting point: rank 0, a trainer's, hosts the
    store.
    """

    master_address: Address
    master_port: Port
    rank_offset: Rank = 1
    world_size: WorldSize
    backend: Backend = "nccl"


MAX_TENSORS = 2**16  # limit on the tensors of one call, which the engine gets in one message
TensorNames = Annotated[list[TensorName], Meta(max_length=MAX_TENSORS)]
TypeNames = Annotated[list[str], Meta(max_length=MAX_TENSORS)]
Shapes = Annotated[list[Dimensions], Meta(max_length=MAX_TENSORS)]


class Packing(NamedTuple):
    """The division of tensors into broadcasts."""

    packed: bool = False  # True: buckets of raw bytes; False: one broadcast per tensor
    bucket_bytes: int = 2**30  # a bucket closes after the tensor that takes it over this


class Broadcasts:
    def __init__(self, session: WeightSession) -> None:
        self._session = session
        self._packing = Packing()  # as the newest `join_transfer` says
        # Group and tensors of a push that is described by one call and made by the next.
        self.described: tuple[str, list[TensorEntry]] | None = None

    async def join(
        self, name: str, ranks: RanksOfGroup, *, prefixed: bool = False, unique_id: bytes = b""
    ) -> list[str]:
        """Join a group. Return the joined groups, once all ranks are there. With NCCL's `unique_id`
        there is neither address nor port.
        """
        port, rank, world_size = ranks.master_port, ranks.rank_offset, ranks.world_size
        number = int(port) if str(port).isdecimal() else 0
        if not (1 <= number <= 65535 or unique_id) or not 1 <= rank < world_size:
            raise InvalidRequest(
                f"the port is {port!r} and the rank {rank} of {world_size}; a port is from 1 to "
                "65535, rank 0 is the trainer's, and ranks are below the world size"
            )
        report = await self._session.ask(
            JoinGroup,
            name,
            ranks.backend,
            ranks.master_address or "",
            number,
            rank,
            world_size,
            prefixed,
            unique_id,
        )
        return report.state.groups

    async def leave(self, name: str) -> list[str]:
        """Leave a group and return the joined groups. It is no error if the group is not joined."""
        return (await self._session.ask(LeaveGroup, name)).state.groups

    @asynccontextmanager
    async def announced(self, group: object) -> AsyncIterator[None]:
        """Enclose the checks of a body that announces tensors through this group, before the engine
        is asked to receive them. If they fail, the tensors have no receiver, so the engine leaves
        the group: the next push would mistake them for its own. `group`: as in the body.
        """
        try:
            yield
        except TltError:
            if group and isinstance(group, str):
                with suppress(TltError):  # an engine that is gone has left it
                    await self._session.ask(LeaveGroup, group, out_of_step=True)
            raise

    async def push(
        self,
        update: Update,
        group: str,
        tensors: Iterable[TensorEntry],
        packing: Packing,
        *,
        selector: Selector | None = None,
        version: str = "",
        in_flight: InFlight = "continue",
    ) -> WeightReport:
        """Receive these tensors through the group, under a label. `selector`: their role; None: the
        update's.
        """
        entries = list(tensors)
        return await self.begin(
            update,
            Manifest(
                role=self._role(entries, selector or update.selector),
                version=version,
                labelled=True,
                channel="broadcast",
                group=group,
                tensors=entries,
                packed=packing.packed,
                bucket_bytes=packing.bucket_bytes,
                partial=True,
                in_flight=in_flight,
            ),
        )

    async def join_transfer(self, info: InitInfo) -> None:
        """Join the group that has one name in all of a trainer's calls, and leave an earlier
        one.
        """
        await self.join(GROUP, info, unique_id=info.unique_id())
        self._packing = Packing(info.packed, info.packed_buffer_size_bytes)

    async def push_announced(self, update: Update, asked: UpdateFields) -> WeightReport:
        """Receive all tensors announced through that group, and return the last report."""
        infos = asked.update_info if isinstance(asked.update_info, list) else [asked.update_info]
        async with self.announced(GROUP):
            # All are checked before the first push, in a thread, since they may be many.
            pushes = await asyncio.to_thread(lambda: [info.entries() for info in infos])
        for info, entries in zip(infos, pushes, strict=True):
            packing, version = info.packing(self._packing), asked.weight_version or ""
            report = await self.push(update, GROUP, entries, packing, version=version)
        return report

    async def begin(self, update: Update, manifest: Manifest) -> WeightReport:
        """Push the manifest. If the update accepts no more, leave the group, as after any
        refusal.
        """
        async with self.announced(manifest.group):
            self._session.check_takes(update)
        return await update.push(manifest)

    @staticmethod
    def _role(entries: list[TensorEntry], selector: Selector | None) -> PushRole:
        prefixed = sum(entry.name.startswith(DRAFTER_PREFIX) for entry in entries)
        if selector == "draft" or (prefixed and prefixed == len(entries)):
            return "drafter"
        return "all" if prefixed else "target"


def described(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> list[TensorEntry]:
    """Return the entries of tensors given as lists of names, types and shapes."""
    if not names or len({len(names), len(dtypes), len(shapes)}) > 1:
        raise InvalidRequest(
            f"there are {len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes; give "
            "one of each for every tensor, in the order in which they are broadcast"
        )
    return [
        TensorEntry(name=name, dtype=dtype, shape=list(shape))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]


GROUP = "weight_transfer"
MAX_UPDATES = 2**10  # broadcasts that one call may announce
ID_BYTES = 128  # size of an id of NCCL
BucketBytes = Annotated[
    int, "a bucket closes after the tensor that takes it over this", Meta(ge=1, le=2**40)
]


class InitInfo(RanksOfGroup, Tolerant, frozen=True, kw_only=True):
    """A group whose ranks from 1 on belong to servers."""

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
        """Return NCCL's id, decoded; empty if the store has it. Ranks meet either by the store or
        by the id, so exactly one of them must be given.
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
