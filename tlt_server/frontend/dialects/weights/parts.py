"""Routes that take weights by http, part by part, before they are pushed."""

from __future__ import annotations

import re
from typing import Annotated

from starlette.convertors import StringConvertor, register_url_convertor
from starlette.requests import Request

from tlt_client.arguments import VERSION_MUST, is_version
from tlt_server.errors import Conflict, Forbidden, InvalidRequest, NotFound, StorageFailed
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.http.endpoints import Routes
from tlt_server.frontend.http.fields import shown
from tlt_server.frontend.http.parameters import HEADER
from tlt_server.frontend.service import Service
from tlt_server.frontend.weights.uploads import PartStatus, Uploads

ROUTES = Routes(engine_fails=False)


class FileNames(StringConvertor):
    """Names that are no verb of a version: those have routes of their own."""

    regex = r"(?!(?:commit|abort)$)[^/]+"


register_url_convertor("file", FileNames())
PART_PATH = "/weights/{version}/{part:file}"
VersionInPath = Annotated[str, "the version that the part belongs to"]
FileInPath = Annotated[str, "a file name: *.safetensors, or calibration.json"]
ContentRange = Annotated[str, HEADER, "bytes FIRST-LAST/TOTAL; absent: the body is the whole part"]
RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)


@ROUTES.put(
    PART_PATH,
    needs="push-weights",
    takes_bytes="application/octet-stream",
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


@ROUTES.get(PART_PATH, needs="push-weights", raises=(NotFound,))
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
