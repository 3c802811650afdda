"""The native weight routes: push, commit, abort, roll back, look; parts by http, process groups.

The engine checks and decides; these routes turn bodies into commands. The reply to a push comes
when the push has ended: committed, staged (with `"commit": false`), unchanged (a repeated push), or
refused.
"""

from __future__ import annotations

import asyncio
import re
from typing import Annotated, Literal

from msgspec import Struct
from msgspec.structs import asdict, replace
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.requests import Request

from tlt_client.arguments import ADAPTER_MUST, VERSION_MUST, is_adapter, is_version
from tlt_server.errors import (
    Conflict,
    Forbidden,
    InvalidRequest,
    NotFound,
    PushFailed,
    StorageFailed,
    from_code,
)
from tlt_server.frontend.dialects.replies.errors import JOINED, PUSHED, RECEIVED, PushReply, outcome
from tlt_server.frontend.dialects.weights.requests import (
    ANNOUNCED,
    PUSH,
    DirectoryFields,
    GroupFields,
    ManifestFields,
    PushAbort,
    RollbackFields,
    manifest_of,
)
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.http.endpoints import HEADER, Routes
from tlt_server.frontend.http.fields import shown
from tlt_server.frontend.service import Service
from tlt_server.frontend.weights.broadcasts import UpdateFields
from tlt_server.frontend.weights.session import Update, UpdateStatus, succeeded
from tlt_server.frontend.weights.uploads import PartStatus, Uploads, UploadStatus
from tlt_server.wire.commands import AbortWeights, CommitWeights, Manifest, RollbackWeights
from tlt_server.wire.events import WeightReport, WeightState

ROUTES = Routes(needs="push-weights")
RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)
PART_PATH = "/weights/{version}/{part:file}"
VersionInPath = Annotated[str, "the version that the part belongs to"]
FileInPath = Annotated[str, "a file name: *.safetensors, or calibration.json"]
ContentRange = Annotated[str, HEADER, "bytes FIRST-LAST/TOTAL; absent: the body is the whole part"]
PushedVersion = Annotated[str, "the version that the push named"]


class GroupsReply(Struct, frozen=True):
    """The process groups after the call."""

    groups: Annotated[list[str], "process groups that are joined"]


@ROUTES.post("/weight_groups", raises=JOINED)
async def join(service: Service, asked: GroupFields) -> GroupsReply:
    """Join a trainer's process group, for pushes by broadcast. The reply comes once all ranks have
    joined.
    """
    return GroupsReply(await service.broadcasts.join(asked.name, asked, prefixed=asked.prefixed))


@ROUTES.delete("/weight_groups/{name}", raises=(Conflict,))
async def leave(service: Service, name: Annotated[str, "the name of the group"]) -> GroupsReply:
    """Leave a process group; it is no error if the group is not joined."""
    return GroupsReply(await service.broadcasts.leave(name))


class FileNames(StringConvertor):
    """File names in a version's path that are not verbs: verbs have routes of their own."""

    regex = r"(?!(?:commit|abort)$)[^/]+"


register_url_convertor("file", FileNames())


@ROUTES.put(
    PART_PATH,
    takes_bytes="application/octet-stream",
    engine_fails=False,
    raises=(Conflict, StorageFailed),
)
async def put(
    service: Service,
    request: Request,
    version: VersionInPath,
    part: FileInPath,
    content_range: ContentRange = "",
) -> PartStatus:
    """Send one part of a version: a safetensors file or a drafter's calibration.json, whole or in
    ranges from its beginning.

    Content-Range tells where the body belongs. A range may be sent again with the same bytes. Once
    all parts are sent, POST /update_weights with channel http pushes the version.
    """
    checked(version)
    length = request.headers.get("content-length")
    start, total = span(content_range, int(length) if length is not None else None)
    owner = caller_of(request).name
    return await opened(service).write(version, part, start, total, request.stream(), owner)


@ROUTES.get(PART_PATH, engine_fails=False, raises=(NotFound,))
async def part_status(service: Service, version: VersionInPath, part: FileInPath) -> PartStatus:
    """Show how much of a part has come, to continue after a broken connection."""
    return opened(service).status(checked(version), part)


def opened(service: Service) -> Uploads:
    """Return the uploads; `Forbidden` if this server takes no weights by http."""
    if service.uploads is None:
        raise Forbidden(
            "this server takes no weights by http; start it with http among its --weight-channels, "
            "and a --state-dir"
        )
    return service.uploads


def checked(version: str) -> str:
    """Return the version in a path, if it can be one."""
    if not is_version(version):
        raise InvalidRequest(f"version is {shown(version)}; it must {VERSION_MUST}")
    return version


class WeightsReply(WeightState, frozen=True, kw_only=True):
    """The state of the weights, of uploads and of the open update."""

    uploads: Annotated[list[UploadStatus], "versions that come by http, oldest first"] = []
    update: Annotated[UpdateStatus | None, "the open weight update; null without one"] = None


@ROUTES.post(
    "/update_weights",
    takes=ManifestFields | DirectoryFields | UpdateFields,
    example={"version": "step-7", "path": "step-7"},
    raises=RECEIVED,
)
async def push(service: Service, request: Request) -> PushReply:
    """Push weights: stage and verify them while the engine runs, commit between two steps.

    Nothing live changes until everything is verified. A repeated push of the same version and
    content is a success. With weight_dir in place of version and path, the form of trainers with a
    shared disk, the version is the directory's name and digest; a directory that holds a LoRA
    adapter is loaded as one by the model's own name. With update_info the named tensors
    come through the group of POST /init_weight_transfer_engine, and the push ends with the call
    that brings the last tensor of the model. Between POST /start_weight_update and
    /finish_weight_update any push waits for the latter.
    """
    with service.session.pushing() as update:
        service.engine.check_running()
        body = await request.body() or b"{}"
        announced = await service.bodies.read(ANNOUNCED, body)
        async with service.broadcasts.announced(announced.group):
            asked = await service.bodies.read(PUSH, body)
            if not isinstance(asked, UpdateFields):
                manifest = await asyncio.to_thread(manifest_of, asked, update.role, service.config)
        if isinstance(asked, UpdateFields):
            return outcome(await service.broadcasts.push_announced(update, asked), labelled=True)
        if manifest.channel == "http" and service.uploads is not None:
            return outcome(await _upload(update, manifest, service.uploads))
        # The engine refuses a push by a channel that is closed.
        report = await service.broadcasts.begin(update, manifest)
        return outcome(report, labelled=manifest.labelled)


async def _upload(update: Update, manifest: Manifest, uploads: Uploads) -> WeightReport:
    """Push an upload by http. Its parts are kept if the same push may still succeed."""
    keep, sealed = True, uploads.seal(manifest.version)
    try:
        report = await update.tried(replace(manifest, path=sealed.path))
        keep = _may_pass(report)
    finally:
        uploads.release(manifest.version, sealed, keep=keep)
    return succeeded(report)


def _may_pass(report: WeightReport) -> bool:
    """Return True if a failed push may succeed with the same parts: if its storage failed, or a
    conflict ended it before it read them. A later conflict concerns their content, or an abort.
    """
    if report.error is None:
        return False
    error = from_code(*report.error)
    return error.retryable or (isinstance(error, Conflict) and not report.phases)


@ROUTES.delete("/adapters/{name:path}", raises=(NotFound, Conflict))
async def unload(
    service: Service,
    name: Annotated[str, "the adapter's name"],
    in_flight: Annotated[
        Literal["drain", "abort"],
        "what becomes of its running requests: they have drain_timeout_s to end, or are ended",
    ] = "drain",
) -> PushReply:
    """Unload a LoRA adapter. New requests for it are refused at once; the reply comes when its last
    request has ended, or was ended after drain_timeout_s.
    """
    if not is_adapter(name):
        raise InvalidRequest(f"name is {shown(name)}; it must {ADAPTER_MUST}")
    return outcome(await service.adapters.unload(name, in_flight))


@ROUTES.get("/weights")
async def look(service: Service) -> WeightsReply:
    """Show which versions are live, kept for a rollback, and being pushed."""
    state = (await service.session.look()).state
    return WeightsReply(
        **asdict(state),
        uploads=service.uploads.listed() if service.uploads is not None else [],
        update=service.session.status,
    )


@ROUTES.post("/weights/rollback", raises=(Conflict, PushFailed))
async def rollback(service: Service, asked: RollbackFields) -> PushReply:
    """Make the previous version live again, bit for bit. `unchanged`: it is live already. A drafter
    that the server trained and adopted itself is not a push to undo (POST /drafter/rollback).
    """
    return outcome(
        await service.session.ask(RollbackWeights, asked.to, asked.in_flight, asked.role)
    )


@ROUTES.post("/weights/abort", raises=(NotFound,))
async def abort_any(service: Service) -> PushReply:
    """End the open push, with or without a name; one that still gathers tensors may have none.
    Nothing live changes.
    """
    return outcome(await service.session.ask(AbortWeights))


@ROUTES.post("/weights/{version}/commit", raises=PUSHED)
async def commit(service: Service, version: PushedVersion) -> PushReply:
    """Make a staged push live. If the version's last push is live already, nothing changes, so the
    call may be repeated.
    """
    return outcome(await service.session.ask(CommitWeights, checked(version)))


@ROUTES.post("/weights/{version}/abort", raises=(NotFound, Conflict))
async def abort(service: Service, asked: PushAbort, version: PushedVersion) -> PushReply:
    """End a push that is not committed, and forget its parts that came by http; nothing live
    changes.

    With upload_only a push that has started continues, also one of another sender. A sender takes
    back what it has sent this way.
    """
    checked(version)
    if asked.upload_only:
        if not opened(service).forget(version):
            raise NotFound(
                f"version {version[:80]!r} has no upload, or a push reads it; GET /weights lists "
                "the uploads"
            )
    else:
        dropped = service.uploads is not None and service.uploads.drop(version)
        try:
            return outcome(await service.session.ask(AbortWeights, version))
        except NotFound:
            if not dropped:
                raise
    state = (await service.session.look()).state
    return PushReply("aborted", version, "", state.target, {}, {}, 0.0)


def span(content_range: str, length: int | None) -> tuple[int, int]:
    """Return where a body starts and how many bytes the part has in all."""
    if not content_range:
        if length is None:
            raise InvalidRequest(
                "the request has neither Content-Range nor Content-Length; send Content-Range: "
                "bytes FIRST-LAST/TOTAL"
            )
        return 0, length
    found = RANGE.fullmatch(content_range)
    first, last, total = map(int, found.groups()) if found else (0, 0, 0)
    if not first <= last < total or (length is not None and length != last + 1 - first):
        raise InvalidRequest(
            f"Content-Range is {content_range[:80]!r} for a body of {length} bytes; it must be "
            "bytes FIRST-LAST/TOTAL, the last included"
        )
    return first, total
