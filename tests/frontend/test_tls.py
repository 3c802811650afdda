"""HTTPS and client certificates over real sockets; certificates that are replaced while serving;
files that cannot be used.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme

from tests.frontend.fake_engine import HANGS
from tests.frontend.live_server import LiveServer, live_server
from tests.frontend.test_command import served
from tests.waiting import until
from tlt_client import AsyncClient, Client, ConnectionFailed, Done, Tls
from tlt_client.errors import NotReached, Unauthenticated
from tlt_server.config import Config
from tlt_server.errors import StartupError
from tlt_server.frontend.http.keys import watched_certificates

SHORT = {"max_tokens": 2}
BATCH = [{"id": "a", "prompt": "ab"}]


class Issuer:
    """A certificate authority that writes what it signs into a directory."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._ca, self._directory = trustme.CA(), directory
        self.ca = directory / "ca.pem"
        self._ca.cert_pem.write_to_path(self.ca)

    def issue(self, name: str, identity: str = "127.0.0.1") -> tuple[Path, Path]:
        cert, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        issued = self._ca.issue_cert(identity)
        cert.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(key)
        return cert, key


@pytest.fixture
def first(tmp_path: Path) -> Issuer:
    return Issuer(tmp_path / "first")


@pytest.fixture
def second(tmp_path: Path) -> Issuer:
    return Issuer(tmp_path / "second")


@pytest.fixture
def files(tmp_path: Path, first: Issuer) -> dict[str, Path]:
    """The settings of a server with a certificate of `first`."""
    found = {"tls_cert": tmp_path / "server.pem", "tls_key": tmp_path / "server.key"}
    put(found, *first.issue("server"))
    return found


def put(files: dict[str, Path], *sources: Path) -> None:
    for place, source in zip(files.values(), sources, strict=False):
        beside = place.with_suffix(".new")
        beside.write_bytes(source.read_bytes())
        os.replace(beside, place)


@pytest.fixture
def secure(model: Path, files: dict[str, Path]) -> Iterator[LiveServer]:
    with live_server(model, **files) as server:
        yield server


def test_both_clients_trust_a_given_certificate_authority(
    secure: LiveServer, first: Issuer, second: Issuer
) -> None:
    async def asked() -> str | None:
        async with AsyncClient(secure.url, tls=Tls(ca=first.ca), timeout_s=20) as client:
            return (await client.generate(BATCH, sampling=SHORT)).results[0].choices[0].text

    assert secure.url.startswith("https://")
    with Client(secure.url, tls=Tls(ca=first.ca), timeout_s=20) as client:
        assert (
            client.generate(BATCH, sampling=SHORT).results[0].choices[0].text
            == asyncio.run(asked())
            == "ab"
        )
        assert isinstance(list(client.stream(BATCH, sampling=SHORT))[-1], Done)
    for tls in (None, Tls(ca=second.ca)):
        with (
            Client(secure.url, tls=tls) as stranger,
            pytest.raises(NotReached, match="CERTIFICATE_VERIFY_FAILED"),
        ):
            stranger.weights()
    with Client(secure.url.replace("https", "http")) as plain, pytest.raises(ConnectionFailed):
        plain.weights()
    assert httpx.get(f"{secure.url}/livez", verify=Tls(ca=first.ca).context()).status_code == 200


def test_client_leaving_over_tls_frees_its_sequences(secure: LiveServer, first: Issuer) -> None:
    with Client(secure.url, tls=Tls(ca=first.ca), timeout_s=20) as client:
        events = client.stream([{"prompt": "abc"}], sampling={"max_tokens": 500})
        next(events)
        events.close()
        until(lambda: len(secure.client) == 0)
        with (
            pytest.raises(ConnectionFailed),
            Client(secure.url, tls=Tls(ca=first.ca), timeout_s=0.3) as impatient,
        ):
            impatient.generate([{"token_ids": [HANGS]}])
        until(lambda: len(secure.client) == 0 and not secure.engine.running)


def test_tls_certificate_and_key_are_both_required(
    model: Path, files: dict[str, Path], first: Issuer, second: Issuer
) -> None:
    own, others = (
        Tls(first.ca, *issuer.issue("client", "trainer@rl.example")) for issuer in (first, second)
    )
    with live_server(
        model, **files, tls_client_ca=first.ca, keys="key scopes=data,operate name=a"
    ) as server:
        with Client(server.url, tls=own, api_key="key", timeout_s=20) as client:
            assert client.generate(BATCH, sampling=SHORT).results[0].choices and client.is_ready()
        with Client(server.url, tls=own) as keyless, pytest.raises(Unauthenticated):
            keyless.server_info()
        for tls in (Tls(first.ca), others):
            with (
                Client(server.url, tls=tls, api_key="key", timeout_s=30) as stranger,
                pytest.raises(ConnectionFailed),
            ):
                stranger.server_info()


def trusts(server: LiveServer, tls: Tls) -> bool:
    """Say whether a new connection can be made."""
    try:
        return httpx.get(f"{server.url}/livez", verify=tls.context(), timeout=30).status_code == 200
    except httpx.TransportError:
        return False


def test_certificates_are_replaced_while_serving(
    model: Path, files: dict[str, Path], first: Issuer, second: Issuer, tmp_path: Path
) -> None:
    trusted = tmp_path / "clients.pem"
    put({"ca": trusted}, first.ca)
    old, new = (
        Tls(issuer.ca, *issuer.issue("client", "trainer@rl.example")) for issuer in (first, second)
    )
    with (
        live_server(model, **files, tls_client_ca=trusted) as server,
        Client(server.url, tls=old, timeout_s=20) as open_before,
    ):
        assert open_before.is_ready() and trusts(server, old) and not trusts(server, new)
        cert, key = second.issue("server")
        put({"cert": files["tls_cert"]}, cert)  # it does not fit the key
        time.sleep(1.1)
        assert trusts(server, old), "what cannot be used changes nothing"
        put({"key": files["tls_key"], "ca": trusted}, key, second.ca)
        until(lambda: trusts(server, new))
        mixed = Tls(second.ca, old.cert, old.key)
        assert not trusts(server, old) and not trusts(server, mixed), (
            "neither the old certificate nor the old clients' CA"
        )
        assert open_before.is_ready(), "a connection that is open goes on"


def test_serve_command_serves_and_prints_https(
    model: Path, files: dict[str, Path], first: Issuer
) -> None:
    flags = [
        part for name, file in files.items() for part in (f"--{name.replace('_', '-')}", str(file))
    ]
    with served("fine", model, *flags) as process:
        process.wait_ready()
        assert process.url.startswith("https://127.0.0.1:")
        with Client(process.url, tls=Tls(ca=first.ca), timeout_s=20) as client:
            assert client.generate(BATCH, sampling=SHORT).results[0].choices[0].text == "ab"
    with served(
        "fine", model, "--tls-cert", "none.pem", "--tls-key", str(files["tls_key"])
    ) as process:
        assert process.ended() == 2 and "cannot read tls_cert none.pem" in process.lines[-1]


@pytest.mark.parametrize(
    ("planted", "says"),
    [
        ({"tls_cert": None}, "cannot read tls_cert"),
        ({"tls_key": None}, "cannot read tls_key"),
        ({"tls_client_ca": None}, "cannot read tls_client_ca"),
        ({"tls_cert": "KEY"}, "holds no certificate"),
        ({"tls_key": "CERT"}, "holds no private key"),
        ({"tls_client_ca": "KEY"}, "holds no certificate"),
        ({"tls_key": "OTHER"}, "cannot be used together (KEY_VALUES_MISMATCH)"),
        (
            {"tls_cert": "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"},
            "cannot be used together",
        ),
        (
            {"tls_client_ca": "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"},
            "tls_client_ca",
        ),
        ({"tls_cert": b"\xff\xfe"}, "cannot read tls_cert"),
        ({"tls_key": "LOCKED"}, "without a passphrase"),
    ],
)
def test_unusable_tls_files_are_refused_by_name(
    planted: dict[str, str | bytes | None],
    says: str,
    model: Path,
    files: dict[str, Path],
    first: Issuer,
    tmp_path: Path,
) -> None:
    contents = {
        "KEY": files["tls_key"].read_bytes(),
        "CERT": files["tls_cert"].read_bytes(),
        "OTHER": first.issue("other")[1].read_bytes(),
        "LOCKED": locked(files["tls_key"].read_bytes()),
    }
    files = {**files, "tls_client_ca": tmp_path / "client-ca.pem"}
    put({"ca": files["tls_client_ca"]}, first.ca)
    assert watched_certificates(Config(model=model, **files)) is not None, "right before the fault"
    for name, content in planted.items():
        if content is None:
            files[name].unlink()
        else:
            files[name].write_bytes(
                content if isinstance(content, bytes) else contents.get(content, content.encode())
            )
    with pytest.raises(StartupError) as caught:
        watched_certificates(Config(model=model, **files))
    assert says in caught.value.message and str(tmp_path) in caught.value.message
    assert any(remedy in caught.value.message for remedy in ("name a PEM file", "give the"))


def locked(key: bytes) -> bytes:
    """Encrypt the key with a passphrase."""
    from cryptography.hazmat.primitives import serialization

    return serialization.load_pem_private_key(key, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )


@pytest.mark.parametrize(
    "tls",
    [
        Tls(ca="none.pem"),
        Tls(cert="none.pem", key="none.key"),
        Tls(cert="none.pem"),
        Tls(key="none.key"),
    ],
)
def test_client_refuses_unusable_tls_files(tls: Tls) -> None:
    with pytest.raises(ValueError, match=r"none\.(pem|key).*(name PEM files|give both)"):
        Client("https://127.0.0.1:1", tls=tls)
