"""API keys and certificates, whose files are read again when they change, without a restart.

A line of the key file is `<key> [scopes=data,push-weights,operate,link] [name=NAME]`, with the key
plain or as `sha256:<hex>`. A key without scopes has all of them. Requests, rollouts and uploads
belong to the name, so during a rotation two lines have the same name. Keys are held as SHA-256
digests and compared in constant time.

TLS of the HTTP and the gRPC server is mutual with a client CA. Each new connection gets the newest
certificate, through TLS's callback for the choice of one; open connections keep theirs.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, TypeVar, get_args

import structlog

from tlt_server.errors import StartupError
from tlt_server.settings.wording import nearest

if TYPE_CHECKING:
    from tlt_server.config import Config


KeyScope = Literal["data", "push-weights", "operate", "link"]
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
                f"{where} begins with sha256: but 64 hex digits do not follow; give the SHA-256 "
                "of the key, as printf %s KEY | sha256sum prints it"
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


LOOK_S = 1.0

Held = TypeVar("Held")
OnRead = Callable[[Literal["read", "refused"]], None]


class Watched(Generic[Held]):
    """Watched files' content, as returned by `read`. The files are checked when it is used, at most
    once a second, so no background task can die. An unusable change is logged as an error, once,
    and the old content stays active.
    """

    def __init__(
        self,
        name: str,
        files: Sequence[Path],
        read: Callable[[], Held],
        on_read: OnRead = lambda result: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read`: raises `StartupError` for unusable content; so does this at the start. `on_read`:
        counts reads for the metrics.
        """
        self._name, self._files, self._read = name, files, read
        self._on_read, self._clock = on_read, clock
        self._marks, self._looked_s = self._look(), clock()
        self._held = read()
        on_read("read")

    def __call__(self) -> Held:
        now = self._clock()
        if now - self._looked_s >= LOOK_S:
            self._looked_s = now
            marks = self._look()
            if marks != self._marks:
                self._marks = marks
                self._renew()
        return self._held

    def _renew(self) -> None:
        try:
            self._held = self._read()
        except StartupError as error:
            log.error(
                "file_refused",
                what=self._name,
                reason=error.message,
                remedy="correct it; its old content stays in force",
            )
            self._on_read("refused")
        else:
            log.info("file_read", what=self._name)
            self._on_read("read")

    def _look(self) -> list[tuple[int, ...]]:
        """Return a mark of each file, which changes when the file is written, replaced or removed.

        Marks are taken before the files are read, so a write in between is noticed next time.
        """
        found: list[tuple[int, ...]] = []
        for file in self._files:
            try:
                about = file.stat()
                found.append((about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns))
            except OSError:
                found.append(())
        return found


class Certificates(NamedTuple):
    """The content of the files: a context for HTTP, PEM for gRPC."""

    context: ssl.SSLContext
    chain: bytes
    key: bytes
    client_ca: bytes | None


def watched_certificates(
    config: Config, on_read: OnRead = lambda result: None
) -> Watched[Certificates] | None:
    """Return the active certificates, or None for a server without TLS. `StartupError` names an
    unusable file.
    """
    cert, key, client_ca = config.tls_cert, config.tls_key, config.tls_client_ca
    if cert is None or key is None:
        return None

    def read() -> Certificates:
        return Certificates(
            _context(cert, key, client_ca),
            cert.read_bytes(),
            key.read_bytes(),
            client_ca.read_bytes() if client_ca is not None else None,
        )

    return Watched(
        "certificates", [file for file in (cert, key, client_ca) if file is not None], read, on_read
    )


def server_context(certificates: Watched[Certificates]) -> ssl.SSLContext:
    """Return the context to listen with."""
    listening = certificates().context

    def choose(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = certificates().context

    # OpenSSL calls this in every handshake, also when the client names no server.
    listening.sni_callback = choose
    return listening


def _context(cert: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # from TLS 1.2 on
    _usable("tls_cert", cert, "-----BEGIN CERTIFICATE-----")
    _usable("tls_key", key, "PRIVATE KEY-----")
    try:
        context.load_cert_chain(cert, key, password=lambda: "")
    except ssl.SSLError as error:
        raise StartupError(
            f"tls_cert {cert} and tls_key {key} cannot be used together ({error.reason or error}); "
            "give the chain, the server's certificate first, and its own key without a passphrase, "
            "both as PEM"
        ) from None
    if client_ca is not None:
        _usable("tls_client_ca", client_ca, "-----BEGIN CERTIFICATE-----")
        try:
            context.load_verify_locations(client_ca)
        except ssl.SSLError as error:
            raise StartupError(
                f"tls_client_ca {client_ca} cannot be used ({error.reason or error}); give the "
                "certificates that sign those of the clients, as PEM"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # A resumed session would not be verified again after the CA has changed.
        context.num_tickets = 0
    return context


def _usable(setting: str, file: Path, begins: str) -> None:
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(
            f"cannot read {setting} {file}: {type(error).__name__}; name a PEM file that this user "
            "may read"
        ) from None
    if begins not in text:
        raise StartupError(
            f"{setting} {file} holds no {begins.strip('-').removeprefix('BEGIN ').lower()}; name a "
            "PEM file that does"
        )
