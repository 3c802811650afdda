"""TLS of the HTTP and the gRPC server, mutual with a client CA.

Certificates are read again when their files change. Each new connection gets the newest one,
through TLS's callback for the choice of a certificate; open connections keep theirs.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple

from tlt_server.config import Config
from tlt_server.errors import StartupError
from tlt_server.frontend.http.watched import OnRead, Watched


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
