"""Exchange between servers that share a drafter: `POST /drafter/samples` receives recorded
sequences; `GET /drafter/files` returns the files of the live drafter, or of the trainer's last
candidate, which a client may push with its next target.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from tlt_client.channels.checkpoint import CALIBRATION, SINGLE
from tlt_server.errors import Conflict, InvalidRequest, ModelError, NotFound, StorageFailed
from tlt_server.frontend.dialects.replies.drafter import CandidateState, candidate_state
from tlt_server.frontend.http.endpoints import Routes
from tlt_server.frontend.http.fields import shown
from tlt_server.frontend.service import Service
from tlt_server.frontend.weights.files import listed, live_files, slice_of
from tlt_server.samples.excerpt import SampleFiles
from tlt_server.samples.inbox import Put

MAX_NUMBER = 2**63 - 1
MAX_SLICE = 2**23  # bytes of a reply
Offered = Annotated[
    Literal["live", "candidate"],
    "live: the drafter that is served; candidate: the last one that the trainer has judged",
]
FileName = Annotated[str, "a name in GET /drafter/files"]
Version = Annotated[str | None, "the drafter's version, as GET /drafter/files says it"]
Start = Annotated[
    int, "first byte of the reply, which has at most 8 MiB", Meta(ge=0, le=MAX_NUMBER)
]
OCTETS = "application/octet-stream"


class SamplesTaken(Struct, frozen=True, kw_only=True):
    """The reply to received sequences."""

    sequences: Annotated[
        int, "sequences that fit; the trainer process leaves out those that it has"
    ]
    refused: Annotated[int, "sequences that did not fit"]
    refusals: Annotated[list[str], "the first reasons for that"]


class DrafterFile(Struct, frozen=True, kw_only=True):
    """A file of a drafter."""

    name: Annotated[str, "file name"]
    bytes: Annotated[int, "its size"]


class DrafterFiles(Struct, frozen=True, kw_only=True):
    """The files of a drafter, which a push of role `drafter` or `all` takes."""

    version: Annotated[str, "their weight version"]
    target_version: Annotated[str, "the target's weight version that is live"]
    files: Annotated[list[DrafterFile], "safetensors files and calibration"]
    candidate: Annotated[
        CandidateState | None,
        "the trial of the candidate, adopted or not; null: it is the live one",
    ]


class OfferedFiles(NamedTuple):
    """A drafter whose files are served."""

    version: str
    directory: Path
    files: list[DrafterFile]
    candidate: CandidateState | None  # None: it is the live one


ROUTES = Routes(needs="operate", link=True, engine_fails=False)


@ROUTES.post("/drafter/samples", takes_bytes=OCTETS, raises=(Conflict, StorageFailed))
async def add(service: Service, request: Request) -> SamplesTaken:
    """Keep sequences that another server of the same target recorded: the body is a reply of GET
    /drafter/samples. The trainer process takes them soon.
    """
    files = service.trainer.files if service.trainer is not None else None
    if files is None:
        raise Conflict(
            "this server keeps no sequences in files; restart it with --drafter-training idle and "
            "--state-dir"
        )
    await asyncio.to_thread(files.inbox.check_room)
    content = await request.body()
    try:
        put = await asyncio.to_thread(_put, files, content)
    except (OSError, ModelError) as error:
        raise StorageFailed(f"the sequences cannot be kept: {error}") from None
    if put.refused and not put.sequences:
        raise InvalidRequest(f"no sequence of the body fits: {'; '.join(put.refusals)}")
    return SamplesTaken(sequences=put.sequences, refused=put.refused, refusals=put.refusals)


@ROUTES.get("/drafter/files", raises=(NotFound, Conflict))
async def files(service: Service, of: Offered = "live") -> DrafterFiles:
    """List the files of the live drafter, so that other servers can be given it, or of the
    trainer's last candidate, so that a client can push it with its next target. A candidate that
    was not adopted is listed, too, with the reason; its files go when the next one is written.
    """
    drafter = await _asked(service, of)
    return DrafterFiles(
        version=drafter.version,
        target_version=service.info.weight_version,
        files=drafter.files,
        candidate=drafter.candidate,
    )


@ROUTES.get("/drafter/files/{name}", text=OCTETS, raises=(NotFound, Conflict))
async def file(
    service: Service,
    name: FileName,
    of: Offered = "live",
    version: Version = None,
    start: Start = 0,
) -> Response:
    """Return 8 MiB of a file of such a drafter, or what is left of it after `start`."""
    drafter = await _asked(service, of)
    if version not in (None, drafter.version):
        which = "live" if drafter.candidate is None else "the last candidate"
        raise Conflict(
            f"version {shown(version)} is not {which} any more, {drafter.version!r} is; start again"
        )
    if not any(found.name == name for found in drafter.files):
        raise NotFound(f"the drafter has no file {shown(name)}; GET /drafter/files lists them")
    data = await slice_of(drafter.directory / name, start, MAX_SLICE)
    return Response(data, media_type=OCTETS)


def _put(files: SampleFiles, content: bytes) -> Put:
    return files.inbox.put(content, files.header())


async def _asked(service: Service, of: Offered) -> OfferedFiles:
    """Return the drafter that `of` names."""
    if of == "live":
        live = await asyncio.to_thread(live_files, service.config, service.running(), "drafter")
        return OfferedFiles(live.version, live.directory, await _files(live.directory), None)
    service.engine.check_running()
    last = service.spot_trainer().candidate
    if last is None:
        raise NotFound(
            "the trainer process has judged no candidate since it started; POST /drafter/train, "
            "then ask again once GET /drafter shows one"
        )
    judged, directory = last
    found = await _files(directory)
    if not {SINGLE, CALIBRATION} <= {file.name for file in found}:
        raise Conflict(
            f"the files of candidate {judged.version!r} are removed, as the next one is being "
            "judged; ask again once GET /drafter shows that one"
        )
    return OfferedFiles(judged.version, directory, found, candidate_state(judged))


async def _files(directory: Path) -> list[DrafterFile]:
    found = await asyncio.to_thread(listed, directory)
    return [DrafterFile(name=name, bytes=size) for name, size in found.items()]
