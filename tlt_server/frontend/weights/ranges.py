"""The place of a body in the part that it belongs to, as Content-Range says it."""

from __future__ import annotations

import re

from tlt_server.errors import InvalidRequest

RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)


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
