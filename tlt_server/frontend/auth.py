"""API keys: kept as SHA-256 digests, compared in constant time. No key file means an open server, on a loopback address only."""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from tlt_server.errors import StartupError, Unauthenticated
from tlt_server.frontend.replies import error_response

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz", "/startupz"})


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
    """Refuses requests without a known key; health probes stay open."""

    def __init__(self, app: ASGIApp, *, keys: Keys | None) -> None:
        self.app, self.keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.keys is None or scope["type"] != "http" or scope["path"] in OPEN_PATHS or self.keys.match(_bearer(scope)):
            await self.app(scope, receive, send)
            return
        error = Unauthenticated("the request carries no known API key; send the header Authorization: Bearer <key>")
        await error_response(error, close=True)(scope, receive, send)


def _bearer(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, token = value.decode("latin-1").partition(" ")
            return token.strip() if kind.lower() == "bearer" else ""
    return ""
