"""The built-in page: `GET /` returns the file `page.html`, the same bytes for every caller, without
figures or secrets.

The browser reads its data from the other routes, with the key that its user enters. The
Content-Security-Policy admits only this server's replies and the page's own script and style, by
their digests.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from tlt_server.frontend.http.endpoints import Routes
from tlt_server.frontend.service import Service

PAGE = Path(__file__).with_name("page.html")


ROUTES = Routes()


@ROUTES.get("/", needs="open", text="text/html")
async def page(service: Service, request: Request) -> Response:
    """Return the built-in page: live figures, strategies over time, and a box to try a prompt."""
    html, headers = _page()
    if headers["etag"] in re.findall(r'"[^"]*"', request.headers.get("if-none-match", "")):
        return Response(status_code=304, headers=headers)
    return Response(html, media_type="text/html", headers=headers)


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    """Read the page and make the headers of its reply."""
    html = PAGE.read_bytes()
    return (
        html,
        {
            "content-security-policy": _policy(html.decode()),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "cache-control": "no-cache",  # ask each time, by the etag
            "etag": f'"{hashlib.sha256(html).hexdigest()[:32]}"',
        },
    )


def _policy(html: str) -> str:
    """Return the Content-Security-Policy of the page."""

    def digests(element: str) -> str:
        (content,) = re.findall(f"<{element}>(.*?)</{element}>", html, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {digests('script')}",
            f"style-src {digests('style')}",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
