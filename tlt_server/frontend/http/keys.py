"""API keys: the caller and the scopes of each key.

A line of the key file is `<key> [scopes=data,push-weights,operate] [name=NAME]`, with the key plain
or as `sha256:<hex>`. A key without scopes has all of them. Requests, rollouts and uploads belong to
the name, so during a rotation two lines have the same name. Keys are held as SHA-256 digests and
compared in constant time. This module knows no transport.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import structlog

from tlt_server.errors import StartupError
from tlt_server.frontend.http.watched import OnRead, Watched
from tlt_server.settings.wording import nearest

if TYPE_CHECKING:
    from tlt_server.config import Config

KeyScope = Literal["data", "push-weights", "operate"]
Needs = KeyScope | Literal["open", "any"]  # a key with this scope; no key; any key
SCOPES: tuple[KeyScope, ...] = get_args(KeyScope)
REMEDY = (
    f"write after each key what it may do, for example scopes=data; there are {', '.join(SCOPES)}"
)

log = structlog.get_logger()


class Caller(NamedTuple):
    """The tenant that a key belongs to. A rollout that a request starts belongs to the name."""

    name: str
    scopes: frozenset[KeyScope]

    def may(self, scope: KeyScope) -> bool:
        return scope in self.scopes

    def sees(self, owner: str) -> bool:
        """Return True if this caller may see and end what `owner` started."""
        return owner == self.name or self.may("operate")


EVERYBODY = Caller("", frozenset(SCOPES))  # any caller of a server without keys
NOBODY = Caller("", frozenset())  # the caller of an open route, whose key is not checked


class Key(NamedTuple):
    """One line of the key file."""

    digest: bytes
    caller: Caller
    unscoped: bool  # its line names no scopes


class Keys:
    """All keys of a server."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def names(self) -> list[str]:
        return [key.caller.name for key in self._keys]

    @property
    def unscoped(self) -> list[str]:
        """Names of the keys that have all scopes because their lines name none."""
        return [key.caller.name for key in self._keys if key.unscoped]

    def find(self, token: str) -> Caller | None:
        """Return the caller whose key this is. Every key is compared, so the time tells nothing."""
        digest, found = hashlib.sha256(token.encode()).digest(), None
        for key in self._keys:
            if hmac.compare_digest(digest, key.digest):
                found = key.caller
        return found


def watched_keys(config: Config, on_read: OnRead = lambda result: None) -> Watched[Keys] | None:
    """Return the active keys, or None for a server without keys. Log which have all scopes."""

    def read() -> Keys:
        keys = read_keys(config)
        if keys.unscoped:
            log.warning("keys_with_all_scopes", keys=keys.unscoped, remedy=REMEDY)
        return keys

    if config.api_key_file is None and not config.api_key_variable:
        return None
    return Watched(
        "api_keys", [config.api_key_file] if config.api_key_file is not None else [], read, on_read
    )


def read_keys(config: Config) -> Keys:
    """Return the keys of the file and of the variable. `StartupError` never quotes a key."""
    keys: list[Key] = []
    for source, text in _sources(config):
        found = [
            _key(line.split(), f"line {number} of {source}")
            for number, line in enumerate(text.splitlines(), 1)
            if line.strip() and not line.strip().startswith("#")
        ]
        if not found:
            raise StartupError(f"{source} holds no key; write one per line")
        keys += found
    if len({key.digest for key in keys}) < len(keys):
        raise StartupError(
            "one API key is given twice; keep the line with the scopes that it should have"
        )
    return Keys(keys)


def _sources(config: Config) -> list[tuple[str, str]]:
    found = []
    if config.api_key_file is not None:
        try:
            found.append((f"api_key_file {config.api_key_file}", config.api_key_file.read_text()))
        except (OSError, UnicodeDecodeError) as error:
            raise StartupError(
                f"cannot read api_key_file {config.api_key_file}: {type(error).__name__}; name a "
                "text file with one key per line"
            ) from None
    if config.api_key_variable:
        if config.api_key_variable not in os.environ:
            raise StartupError(
                f"api_key_variable is {config.api_key_variable!r}, which is not set; put the keys "
                "there, one per line"
            )
        found.append(
            (f"the variable {config.api_key_variable}", os.environ[config.api_key_variable])
        )
    return found


def _key(words: list[str], where: str) -> Key:
    secret, fields = words[0], dict[str, str]()
    for word in words[1:]:
        field, _, value = word.partition("=")
        if field not in ("scopes", "name") or not value or field in fields:
            raise StartupError(
                f"{where} has something after the key that is not one scopes=... or one name=...; "
                "write <key> scopes=data,push-weights name=trainer, and no spaces within these"
            )
        fields[field] = value
    digest = _digest(secret, where)
    name = fields.get("name", f"sha256:{digest.hex()[:16]}")
    if "name" in fields and not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise StartupError(
            f"{where} names the key {name[:80]!r}; a name has 1 to 64 letters, digits, dots, "
            "dashes and underscores"
        )
    return Key(
        digest,
        Caller(name, _scopes(fields.get("scopes", ",".join(SCOPES)), where)),
        "scopes" not in fields,
    )


def _digest(secret: str, where: str) -> bytes:
    if secret.startswith("sha256:"):
        if not re.fullmatch(r"sha256:[0-9a-fA-F]{64}", secret):
            raise StartupError(
                f"{where} begins with sha256: but does not go on with 64 hex digits; give the "
                "SHA-256 of the key, as printf %s KEY | sha256sum prints it"
            )
        return bytes.fromhex(secret.removeprefix("sha256:"))
    if not re.fullmatch(r"[!-~]+", secret):
        raise StartupError(
            f"the key in {where} has characters that no header can carry; use letters, digits and "
            "punctuation of ASCII"
        )
    return hashlib.sha256(secret.encode()).digest()


def _scopes(text: str, where: str) -> frozenset[KeyScope]:
    asked = text.split(",")
    for scope in asked:
        if scope not in SCOPES:
            raise StartupError(
                f"{where} has the scope {scope[:80]!r}; known are {', '.join(SCOPES)}"
                f"{nearest(scope, SCOPES)}"
            )
    return frozenset(scope for scope in SCOPES if scope in asked)
