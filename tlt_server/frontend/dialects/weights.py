"""Weights: push, commit, abort, roll back, look; parts that come by http. The engine checks and
decides; here bodies become commands.

`POST /update_weights` dispatches on keys: `weight_dir` is what trainers with a shared disk send,
`update_info` what those send that broadcast to the group of the dialect `vllm_rl`, anything else is
the native manifest. A reply comes when the push has ended: committed, staged (with `"commit":
false`), unchanged (a repeated push), or refused.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal, cast

from msgspec import Meta, Struct
from msgspec.structs import asdict, replace
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from tlt_client.arguments import VERSION_MUST, is_version
from tlt_server.errors import (
    ChannelBroken,
    Conflict,
    EngineFailed,
    Forbidden,
    InvalidRequest,
    NotFound,
    PushFailed,
    StorageFailed,
    Unavailable,
    WeightsRefused,
    from_code,
)
from tlt_server.frontend.http.bodies import read_object
from tlt_server.frontend.http.endpoints import Endpoint, Parameter
from tlt_server.frontend.http.fields import Strict, checked, shown
from tlt_server.frontend.http.replies import json_response
from tlt_server.frontend.service import Service
from tlt_server.frontend.weights.broadcasts import (
    Address,
    Dimensions,
    Port,
    Rank,
    TensorName,
    WorldSize,
)
from tlt_server.frontend.weights.session import Update, UpdateStatus, Version, succeeded
from tlt_server.frontend.weights.transfer import GROUP, UpdateFields
from tlt_server.frontend.weights.uploads import PartStatus, Uploads, UploadStatus, span
from tlt_server.records import (
    AbortWeights,
    CommitWeights,
    InFlight,
    Manifest,
    Role,
    RollbackWeights,
    TensorEntry,
    WeightReport,
    WeightState,
)


class TensorFields(Strict):
    name: Annotated[
        TensorName,
        Field(
            description="as the checkpoint names it; with role all, the drafter's begin with `draft.`"
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
            description='"mix64:<hex>" of the values, or "sha256:<hex>" or "xxh3:<hex>" of the bytes pushed',
        ),
    ] = ""


class ManifestFields(Strict):
    version: Version
    path: Annotated[
        str | None,
        Field(
            min_length=1,
            description="by disk: directory of safetensors, absolute or below the weight root; by ipc: name of the socket that "
            "the engine makes in the directory `sockets` of GET /weights",
        ),
    ] = None
    role: Annotated[
        Literal["target", "drafter", "all"],
        Field(description="what is pushed; all: both in one transaction"),
    ] = "target"
    channel: Annotated[
        Literal["disk", "http", "broadcast", "ipc"],
        Field(
            description="how the tensors come: from a directory, from parts sent before, from a process group, or from memory of a process on "
            "the same host"
        ),
    ] = "disk"
    drafter_path: Annotated[
        str, Field(description="by disk with role all: the drafter's directory")
    ] = ""
    tensors: Annotated[
        list[TensorFields],
        Field(
            description="what must be there; empty: whatever the model has. By http each with its checksum, by broadcast and ipc with dtype "
            "and shape, in the order they come"
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
            description="by broadcast: `tensors` are some of the model's; calls of the same version bring the others, and the one that brings "
            "the last of them ends the push"
        ),
    ] = False
    in_flight: Annotated[
        InFlight, Field(description="what becomes of running requests when the target changes")
    ] = "continue"
    commit: Annotated[
        bool, Field(description="false: stay staged until POST /weights/{version}/commit")
    ] = True


class DirectoryFields(BaseModel):
    """What trainers with a shared disk send; other fields are ignored."""

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
            description="that pushes call it by",
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
            description="keys of the store begin with the group's name, as torch lays them for named groups"
        ),
    ] = False


class RollbackFields(Strict):
    to: Annotated[
        str,
        Field(
            description="the version before, of the target, the drafter or both, that is to be live after it; makes a "
            "repeated call safe. Absent: undo the last commit, of whichever models that brought"
        ),
    ] = ""
    in_flight: Annotated[
        InFlight, Field(description="what becomes of running requests when the target changes")
    ] = "continue"


class AbortFields(Strict):
    """A body may be left out."""

    upload_only: Annotated[
        bool, Field(description="end what has come by http and is not being pushed, and no push")
    ] = False


class NoFields(Strict):
    """Nothing; a body may be left out."""


PART_PATH = "/weights/{version}/{part}.safetensors"
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
PushState = Literal[
    "committed", "staged", "gathering", "unchanged", "aborted", "named", "rolled_back"
]


class PushReply(Struct, frozen=True):
    """What became of a push, a commit, an abort or a rollback."""

    state: Annotated[
        PushState,
        Meta(
            description="what became of it; gathering: tensors are missing that further calls bring; unchanged: the same push, or the version "
            "to be committed, was live before, or nothing was pushed"
        ),
    ]
    version: Annotated[str, Meta(description="of the push")]
    role: Annotated[str, Meta(description="what was pushed")]
    weight_version: Annotated[str, Meta(description="the target's version that is live now")]
    checksums: Annotated[
        dict[str, str], Meta(description="of the tensors pushed: mix64 of their values, by name")
    ]
    phases_s: Annotated[
        dict[str, float], Meta(description="what the push took, by phase, in seconds")
    ]
    pause_ms: Annotated[float, Meta(description="for which the commit kept the loop from stepping")]


class WeightsReply(WeightState, frozen=True, kw_only=True):
    uploads: Annotated[
        list[UploadStatus], Meta(description="versions on their way by http, oldest first")
    ] = []
    update: Annotated[
        UpdateStatus | None,
        Meta(description="the weight update that was begun and not ended; null without one"),
    ] = None


class GroupsReply(Struct, frozen=True):
    groups: Annotated[list[str], Meta(description="process groups that are joined")]


def routes(service: Service) -> list[Endpoint]:
    engine, session, answer = service.engine, service.session, service.session.ask
    uploads = Uploads(service.config) if "http" in service.config.channels else None

    async def push(request: Request) -> Response:
        """Push weights: stage and verify beside the running loop, commit between two steps.

        Until everything is verified nothing live changes. A repeated push of the same version and
        content is a success. With weight_dir in place of version and path, the form of trainers
        with a shared disk, the version is the directory's name and digest. With update_info the
        named tensors come through the group of POST /init_weight_transfer_engine; the push ends
        with the call that brings the last of the model's. Between POST /start_weight_update and
        /finish_weight_update any push waits for the latter.
        """
        with session.pushing() as update:
            engine.check_running()
            content = await _content(await request.body(), "version")
            async with service.broadcasts.announced(_group(content)):
                body = _pushed(content)
                manifest = _manifest(body, update.role) if "update_info" not in body else None
            if manifest is None:
                return outcome(await service.transfer.push(update, body))
            if (
                manifest.channel != "http" or uploads is None
            ):  # a closed channel is the engine's to refuse
                return outcome(await service.broadcasts.begin(update, manifest))
            return outcome(await _upload(update, manifest, uploads))

    async def _upload(update: Update, manifest: Manifest, uploads: Uploads) -> WeightReport:
        """Push what came by http; its parts are kept where the same push may yet succeed."""
        keep, sealed = True, uploads.seal(manifest.version)
        try:
            report = await update.tried(replace(manifest, path=sealed.path))
            keep = _may_pass(report)
        finally:
            uploads.release(manifest.version, sealed, keep=keep)
        return succeeded(report)

    def opened() -> Uploads:
        if uploads is None:
            raise Forbidden(
                "this server takes no weights by http; start it with http among its --weight-channels, and a --state-dir"
            )
        return uploads

    async def put(request: Request) -> Response:
        """Send one part of a version: a safetensors file, whole or in ranges from its beginning.

        Content-Range says where the body belongs; a range that came before is welcome with the same
        bytes. The version is pushed by POST /update_weights with channel http once all parts are
        there.
        """
        version, part = _part(request)
        length = request.headers.get("content-length")
        start, total = span(
            request.headers.get("content-range", ""), int(length) if length is not None else None
        )
        return json_response(await opened().write(version, part, start, total, request.stream()))

    async def part_status(request: Request) -> Response:
        """How much of a part is there, to go on after a broken connection."""
        return json_response(opened().status(*_part(request)))

    async def join(request: Request) -> Response:
        """Join a trainer's process group, for pushes by broadcast. Answers once all ranks are
        there.
        """
        asked = checked(GroupFields, await _content(await request.body(), "name"))
        return json_response(
            GroupsReply(
                await service.broadcasts.join(
                    asked.name,
                    asked.backend,
                    asked.master_address,
                    asked.master_port,
                    asked.rank_offset,
                    asked.world_size,
                    prefixed=asked.prefixed,
                )
            )
        )

    async def leave(request: Request) -> Response:
        """Leave a process group; one that is not joined is left already."""
        return json_response(
            GroupsReply(await service.broadcasts.leave(request.path_params["name"]))
        )

    async def commit(request: Request) -> Response:
        """Make a staged push live. Where the version's last push is live already it changes
        nothing, so this may be asked again.
        """
        checked(NoFields, await _content(await request.body(), "nothing"))
        return outcome(
            await answer(CommitWeights(engine.command_id(), request.path_params["version"]))
        )

    async def abort(request: Request) -> Response:
        """End a push that is not committed, and forget its parts that came by http; nothing
        changes.

        With upload_only a push that has begun goes on, whoever's it is: that is how a sender takes
        back what it has sent.
        """
        asked = checked(AbortFields, await _content(await request.body(), "upload_only"))
        version = request.path_params["version"]
        if asked.upload_only:
            if not opened().forget(version):
                raise NotFound(
                    f"there is no upload of version {version[:80]!r} that no push reads; GET /weights says what there is"
                )
        else:
            dropped = uploads is not None and uploads.drop(version)
            try:
                return outcome(await answer(AbortWeights(engine.command_id(), version)))
            except NotFound:
                if not dropped:
                    raise
        state = (await session.look()).state
        return json_response(PushReply("aborted", version, "", state.target, {}, {}, 0.0))

    async def abort_any(request: Request) -> Response:
        """End the push on its way, whatever it is called; one that still gathers tensors may have
        no name. Nothing changes.
        """
        checked(NoFields, await _content(await request.body(), "nothing"))
        return outcome(await answer(AbortWeights(engine.command_id())))

    async def rollback(request: Request) -> Response:
        """Make the version before live again, bit for bit."""
        asked = checked(RollbackFields, await _content(await request.body(), "to"))
        return outcome(
            await answer(RollbackWeights(engine.command_id(), asked.to, asked.in_flight))
        )

    async def look(request: Request) -> Response:
        """Which versions are live, kept for a rollback, and on their way."""
        state = (await session.look()).state
        return json_response(
            WeightsReply(
                **asdict(state),
                uploads=uploads.listed() if uploads is not None else [],
                update=session.status,
            )
        )

    gone = (EngineFailed, Unavailable)
    part = (
        Parameter("version", "path", "that the part belongs to"),
        Parameter("part", "path", "a file name, without its ending"),
    )
    content_range = Parameter(
        "Content-Range", "header", "bytes FIRST-LAST/TOTAL; absent: the body is the whole part"
    )
    endpoint = partial(Endpoint, needs="push-weights")
    pushed = partial(
        endpoint,
        "POST",
        optional_body=True,
        gives=PushReply,
        parameters=(Parameter("version", "path", "the version that the push named"),),
    )
    return [
        endpoint(
            "POST",
            "/update_weights",
            push,
            takes=ManifestFields | DirectoryFields | UpdateFields,
            example={"version": "step-7", "path": "step-7"},
            gives=PushReply,
            raises=(
                Forbidden,
                NotFound,
                Conflict,
                WeightsRefused,
                ChannelBroken,
                PushFailed,
                *gone,
            ),
        ),
        endpoint(
            "POST",
            "/weight_groups",
            join,
            takes=GroupFields,
            gives=GroupsReply,
            raises=(Forbidden, Conflict, WeightsRefused, ChannelBroken, *gone),
        ),
        endpoint(
            "DELETE",
            "/weight_groups/{name}",
            leave,
            parameters=(Parameter("name", "path", "of the group"),),
            gives=GroupsReply,
            raises=(Conflict, *gone),
        ),
        endpoint("GET", "/weights", look, gives=WeightsReply, raises=gone),
        endpoint(
            "POST",
            "/weights/rollback",
            rollback,
            takes=RollbackFields,
            optional_body=True,
            gives=PushReply,
            raises=(Conflict, PushFailed, *gone),
        ),
        endpoint(
            "POST",
            "/weights/abort",
            abort_any,
            takes=NoFields,
            optional_body=True,
            gives=PushReply,
            raises=(NotFound, *gone),
        ),
        pushed(
            "/weights/{version}/commit",
            commit,
            takes=NoFields,
            raises=(NotFound, Conflict, WeightsRefused, PushFailed, *gone),
        ),
        pushed(
            "/weights/{version}/abort",
            abort,
            takes=AbortFields,
            raises=(Forbidden, NotFound, Conflict, *gone),
        ),
        endpoint(
            "PUT",
            PART_PATH,
            put,
            parameters=(*part, content_range),
            takes_bytes="application/octet-stream",
            gives=PartStatus,
            raises=(Forbidden, Conflict, StorageFailed),
        ),
        endpoint(
            "GET",
            PART_PATH,
            part_status,
            parameters=part,
            gives=PartStatus,
            raises=(Forbidden, NotFound),
        ),
    ]


def _part(request: Request) -> tuple[str, str]:
    """Version and file name."""
    version = request.path_params["version"]
    if not is_version(version):
        raise InvalidRequest(f"version is {shown(version)}; it must {VERSION_MUST}")
    return version, request.path_params["part"] + PART_PATH.rpartition("}")[2]


def _may_pass(report: WeightReport) -> bool:
    """Whether a push that failed may succeed with the same parts: its storage failed, or something
    was in its way before it read them. A conflict afterwards is one with what they hold, or an
    abort.
    """
    if report.error is None:
        return False
    error = from_code(*report.error)
    return error.retryable or (isinstance(error, Conflict) and not report.phases)


async def _content(body: bytes, field: str) -> dict[str, Any]:
    """No body at all is an empty object."""
    return await read_object(body, field) if body else {}


def _group(body: dict[str, Any]) -> object:
    """That brings what this body is about, if one does; what update_info says is `Transfer`'s."""
    return body.get(
        "group", GROUP if body.get("weight_dir", "") is None and "version" not in body else ""
    )


def _pushed(body: dict[str, Any]) -> dict[str, Any]:
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


def outcome(report: WeightReport) -> Response:
    return json_response(
        PushReply(
            cast(PushState, report.result),
            report.version,
            report.role,
            report.state.target,
            report.checksums,
            report.phases,
            report.pause_ms,
        )
    )


def _manifest(body: dict[str, Any], role: Role) -> Manifest:
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
