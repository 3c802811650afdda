"""API keys: kept as SHA-256 digests, compared in constant time. No key file means an open server, on a loopback address only.

An open server still answers nobody but this machine's own programs: a web page that makes a browser call it shows in the headers
Host (a name that resolves to this machine) or Origin (a page from elsewhere), and is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from tlt_server.config import is_loopback
from tlt_server.errors import Forbidden, StartupError, TltError, Unauthenticated

OPEN_PATHS = frozenset({"/", "/health", "/livez", "/readyz", "/startupz"})  # probes, and the page, which is the same for everybody


class Keys:
    def __init__(self, digests: list[bytes]) -> None:
        self._digests = digests

    @classmethod
    def read(cls, path: Path) -> Keys:
        """One key per line, plain or `sha256:<hex>`; empty lines and lines that start with # are skipped."""
        try:
            lines = [line.strip() for line in path.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise StartupError(f"cannot read api_key_file {path}: {type(error).__name__}; name a text file with one key per line") from None
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise StartupError(f"api_key_file {path} holds no key; write one per line")
        return cls([_digest_of(key) for key in keys])

    def match(self, token: str) -> bool:
        digest = hashlib.sha256(token.encode()).digest()
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0  # looks at all, whatever matches


def _digest_of(line: str) -> bytes:
    hashed = re.fullmatch(r"sha256:([0-9a-fA-F]{64})", line)
    return bytes.fromhex(hashed[1]) if hashed else hashlib.sha256(line.encode()).digest()


class Authentication:
    """Refuses requests without a known key, or without keys those that come by way of a foreign name; `OPEN_PATHS` stay open."""

    def __init__(self, app: ASGIApp, *, keys: Keys | None, refuse: Callable[[str, TltError], ASGIApp]) -> None:
        """`refuse(path, error)` is the answer that closes the connection."""
        self.app, self.keys, self.refuse = app, keys, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" and scope["path"] not in OPEN_PATHS else None
        if error is None:
            await self.app(scope, receive, send)
        else:
            await self.refuse(scope["path"], error)(scope, receive, send)

    def _refusal(self, scope: Scope) -> TltError | None:
        if self.keys is not None:
            kind, _, token = _header(scope, b"authorization").partition(" ")
            known = kind.lower() == "bearer" and self.keys.match(token.strip())
            return None if known else Unauthenticated("the request carries no known API key; send the header Authorization: Bearer <key>")
        for name in ("host", "origin"):
            value = _header(scope, name.encode())
            if value and not _is_own(value):
                return Forbidden(f"the header {name} is {value[:100]!r}; a server without API keys answers to localhost only: "
                                 "call it by that name, or start it with --api-key-file")
        return None


def _header(scope: Scope, wanted: bytes) -> str:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == wanted), "")


def _is_own(authority: str) -> bool:
    """Whether a Host or Origin header names this machine by a loopback name or address."""
    try:
        host = urlsplit(authority if "://" in authority else f"//{authority}").hostname
    except ValueError:
        return False
    return host is not None and is_loopback(host)
