"""Files of weights for other servers of a fleet: `GET /weights/files` lists those of a version,
`GET /weights/files/{role}/{name}` returns them in slices.

A version is what is committed for a role, or an upload that is being pushed, which a gateway's
replicas take.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from msgspec import Meta
from starlette.responses import Response

from tlt_client.channels.checkpoint import ADAPTER_CONFIG, CALIBRATION
from tlt_client.channels.peer import SLICE_BYTES, PeerFiles
from tlt_server.errors import Conflict, NotFound
from tlt_server.frontend.http.endpoints import Routes
from tlt_server.frontend.http.fields import shown
from tlt_server.frontend.service import Service
from tlt_server.frontend.weights.files import KeptFiles, described, live_files, slice_of

MAX_NUMBER = 2**63 - 1
OCTETS = "application/octet-stream"
FilesRole = Annotated[Literal["target", "drafter", "all", "adapter"], "whose weights"]
FilesAdapter = Annotated[str, "with role adapter: its name"]
FilesVersion = Annotated[str, "the version that is wanted; absent: the one that is live"]
FilesTaker = Annotated[str, "a name that the requests of one taker share; at most 4 take at a time"]
FilesPart = Annotated[str, "a name in GET /weights/files"]
FilesStart = Annotated[
    int, "first byte of the reply, which has at most 16 MiB", Meta(ge=0, le=MAX_NUMBER)
]


ROUTES = Routes(needs="link", engine_fails=False)


@ROUTES.get("/weights/files", raises=(NotFound, Conflict))
async def listing(
    service: Service,
    role: FilesRole = "target",
    adapter: FilesAdapter = "",
    version: FilesVersion = "",
    taker: FilesTaker = "",
) -> PeerFiles:
    """List the files of a committed version, or of an upload that is being pushed, so that another
    server can take them.
    """
    service.takers.admit(taker)
    found = await _wanted(service, role, adapter, version)
    try:
        async with service.takers.describing:
            files = await asyncio.to_thread(described, found.directory)
    except OSError as error:
        raise Conflict(f"a file has been removed ({error.strerror}); ask again") from None
    return PeerFiles(role, found.version, found.digest, files)


@ROUTES.get("/weights/files/{role}/{name}", text=OCTETS, raises=(NotFound, Conflict))
async def content(
    service: Service,
    role: FilesRole,
    name: FilesPart,
    adapter: FilesAdapter = "",
    version: FilesVersion = "",
    start: FilesStart = 0,
    taker: FilesTaker = "",
) -> Response:
    """Return 16 MiB of a file of such a version, or what is left of it after `start`."""
    service.takers.admit(taker)
    found = await _wanted(service, role, adapter, version)
    if not name.endswith(".safetensors") and name not in (CALIBRATION, ADAPTER_CONFIG):
        raise NotFound(f"there is no file {shown(name)}; GET /weights/files lists them")
    data = await slice_of(found.directory / name, start, SLICE_BYTES)
    return Response(data, media_type=OCTETS)


async def _wanted(service: Service, role: str, adapter: str, version: str) -> KeptFiles:
    """Return the files that are asked for."""
    sealed = service.uploads.sealed(version) if service.uploads is not None else None
    if sealed is not None:
        return KeptFiles(version, "", sealed)
    service.engine.check_serving()
    if role not in ("target", "drafter", "adapter"):
        raise NotFound(f"role is {shown(role)}; there is no upload of version {shown(version)}")
    found = await asyncio.to_thread(live_files, service.config, service.info, role, adapter)
    if version not in ("", found.version):
        raise Conflict(
            f"version {shown(version)} of the {role} is not live here, {found.version!r} is; take "
            "that one, or ask another server"
        )
    return found
