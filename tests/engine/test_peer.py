"""The channel `peer`: an engine takes a version's files from another server, whole and right or not
at all.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from safetensors.torch import load_file, save

from tests.engine.adapters import write_adapter
from tests.engine.pushing import Pushable, cpu_settings, perturbed, why
from tests.engine.tiny import SMALLEST, write_eagle, write_target
from tests.engine.weight_cases import request
from tests.frontend.live_server import LiveServer, live_server
from tests.frontend.test_tls import Issuer
from tests.frontend.tiny_model import write_model
from tlt_client import Client
from tlt_client.channels import peer
from tlt_client.channels.checkpoint import SINGLE
from tlt_client.channels.checksums import xxh3
from tlt_client.channels.errors import ContentRefused
from tlt_client.channels.http import HttpSender
from tlt_client.channels.peer import sources_of
from tlt_server.engine.settings import EngineSettings
from tlt_server.frontend.link.merging import digests
from tlt_server.frontend.weights import files
from tlt_server.wire.kept import WEIGHTS

KEY = "secret-of-the-fleet"
Handler = BaseHTTPRequestHandler


@pytest.fixture(autouse=True)
def sources_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "sample", lambda found, count: found)
    monkeypatch.setattr(files, "TAKER_S", 0.0)  # many tests take from one server


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("peers")
    write_target(root / "base", shape=SMALLEST)
    write_eagle(root / "drafter", shape=SMALLEST, draft_vocab=40)
    perturbed(root / "base", root / "new", 1)
    perturbed(root / "drafter", root / "new-drafter", 2)
    write_adapter(root / "adapter", root / "base", 1)
    return root


def settings(root: Path, state: Path, **fields: Any) -> EngineSettings:
    return cpu_settings(
        root / "base",
        root / "drafter",
        kv_memory_mb=4,
        threads=1,
        weight_root=str(root),
        state_dir=state,
        max_loras=1,
        max_lora_rank=4,
        link_port=0,
        **fields,
    )


@pytest.fixture(scope="module")
def given(root: Path) -> Pushable:
    """An engine that has all of version v1."""
    engine = Pushable(settings(root, root / "given"))
    both = {"role": "all", "drafter_path": str(root / "new-drafter")}
    assert engine.push(root / "new", "v1", **both).result == "committed"
    adapter = engine.push(root / "adapter", "a1", role="adapter", adapter="math")
    assert adapter.result == "committed"
    return engine


@contextmanager
def giving(given: Pushable, place: Path, **settings: Any) -> Iterator[LiveServer]:
    """Start a frontend over a copy of that engine's spool."""
    root = Path(given.settings.model).parent
    shutil.copytree(root / "given" / WEIGHTS, place / "state" / WEIGHTS)
    with live_server(
        write_model(place / "frontend"),
        keys=f"{KEY} scopes=link,push-weights name=fleet\n",
        drafter=str(root / "drafter"),
        state_dir=place / "state",
        weight_channels="http",
        **settings,
    ) as running:
        state = given.engine.pushes.state()
        running.client.replica.info = msgspec.structs.replace(
            running.client.replica.info,  # type: ignore[type-var]
            weight_version=state.target,
            drafter_version=state.drafter,
            adapters=state.adapters,
        )
        yield running


@pytest.fixture(scope="module")
def server(root: Path, given: Pushable) -> Iterator[LiveServer]:
    with giving(given, root / "giving") as running:
        yield running


@pytest.fixture(scope="module")
def taker(root: Path) -> Pushable:
    return Pushable(settings(root, root / "taken"))


def pulled(engine: Pushable, *sources: str, version: str = "v1", **fields: Any) -> Any:
    found = engine.push(" ".join(sources), version, channel="peer", key=KEY, **fields)
    assert KEY not in why(found)
    assert not [*Path(engine.settings.state_dir or "").glob("weights/push-pulled-*")]
    return found


def test_files_of_another_server_give_the_version_pushed_by_disk(
    given: Pushable, server: LiveServer, root: Path
) -> None:
    taker = Pushable(settings(root, root / "joined"))
    for role in ("target", "drafter"):
        report = pulled(taker, server.url, role=role, commit=False)
        assert report.result == "staged", why(report)
        assert taker.commit("v1").result == "committed"
    report = pulled(taker, server.url, version="a1", role="adapter", adapter="math")
    assert report.result == "committed", why(report)
    lora = msgspec.structs.replace(request(), lora="math")
    for engine in (taker, Pushable(taker.settings)):  # a restart has them, too
        assert engine.checksums() == given.checksums()
        assert engine.engine.pushes.state().adapters == {"math": "a1"}
        assert engine.run(request()) == given.run(request())
        assert engine.run(lora) == given.run(lora)


def test_an_upload_of_both_roles_comes_from_a_gateway(
    given: Pushable, server: LiveServer, root: Path
) -> None:
    taker, uploads = Pushable(settings(root, root / "uploaded")), server.service.uploads
    assert uploads is not None
    sent: dict[str, Any] = {}

    class Trainer(Client):
        def push_weights(self, version: str, **fields: Any) -> Any:
            sent.update(fields, version=version)

    with Trainer(server.url, api_key=KEY) as client:
        HttpSender(client).push_directory(
            root / "new", "v1", drafter=root / "new-drafter", role="all"
        )
    sealed = server.call(lambda: uploads.seal("v1"))
    report = pulled(taker, server.url, role="all", tensors=sent["tensors"])
    assert report.result == "committed", why(report)
    assert taker.checksums() == given.checksums()
    server.call(lambda: uploads.release("v1", sealed, keep=False))


def test_servers_of_a_fleet_know_each_other_by_certificates(
    root: Path, given: Pushable, server: LiveServer, tmp_path: Path
) -> None:
    ours, other = Issuer(tmp_path / "ours"), Issuer(tmp_path / "other")
    cert, key = ours.issue("replica")
    found = []
    with giving(
        given, tmp_path / "giving", tls_cert=cert, tls_key=key, tls_client_ca=ours.ca
    ) as secured:
        for pair, ca in (((cert, key), ours.ca), (other.issue("x"), ours.ca), ((cert, key), "/")):
            tls = {"ca": str(ca), "cert": str(pair[0]), "key": str(pair[1])}
            one = Pushable(settings(root, tmp_path / "state", peer_tls=tls))
            found.append(why(pulled(one, secured.url, commit=False)))
    assert found[0] == "" and all(said.startswith("channel_broken") for said in found[1:])


def test_weights_by_peer_need_a_link_and_a_state_directory(root: Path) -> None:
    for fields in ({"link_port": None}, {"state_dir": None}, {"weight_root": None}):
        engine = Pushable(replace(settings(root, root / "closed"), **fields))  # type: ignore[arg-type]
        refused = why(engine.push("http://127.0.0.1:1", "v1", channel="peer"))
        assert refused.startswith("forbidden: this server takes no weights by peer")
        assert "--link-port" in refused and "--state-dir" in refused


# -- sources that fail -----------------------------------------------------------------------------


class Quiet(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A taker that leaves is no error."""


class Source:
    """A server of one file, whose replies a test may spoil."""

    def __init__(self, content: bytes) -> None:
        self.content, self.asked = content, list[str]()
        self.spoil: Callable[[Handler, bytes], bytes | None] = lambda handler, data: data
        source = self

        class Answering(Handler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                assert self.headers["Authorization"] == f"Bearer {KEY}"
                source.asked.append(self.path)
                data = source.spoil(self, source.reply(self.path))
                if data is not None:
                    answer(self, data)

            def log_message(self, *given: Any) -> None:
                return

        self._server = Quiet(("127.0.0.1", 0), Answering)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def reply(self, path: str) -> bytes:
        query = parse_qs(urlsplit(path).query)
        if "start" in query:
            start = int(query["start"][0])
            return self.content[start : start + peer.SLICE_BYTES]
        return json.dumps(self.list()).encode()

    def list(self) -> dict[str, Any]:
        starts, content = range(0, len(self.content), peer.SLICE_BYTES), memoryview(self.content)
        digests = [xxh3(content[start : start + peer.SLICE_BYTES]) for start in starts]
        file = {"name": SINGLE, "bytes": len(self.content), "digests": digests}
        return {"role": "target", "version": "v1", "digest": "", "files": [file]}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def answer(handler: Handler, data: bytes, status: int = 200, **headers: str) -> None:
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(data)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(data)


@pytest.fixture
def source(root: Path) -> Iterator[Source]:
    source = Source((root / "new" / SINGLE).read_bytes())
    yield source
    source.close()


def is_slice(handler: Handler) -> bool:
    return "start=" in handler.path


def flipped(handler: Handler, data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1]) if is_slice(handler) else data


def shorter(handler: Handler, data: bytes) -> bytes:
    return data[:-1] if is_slice(handler) else data


def broken_off(handler: Handler, data: bytes) -> bytes | None:
    if not is_slice(handler):
        return data
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data[:-1])
    handler.close_connection = True
    return None


def endless(handler: Handler, data: bytes) -> None:
    handler.send_response(200)
    handler.end_headers()
    handler.close_connection = True
    try:
        while True:
            handler.wfile.write(bytes(2**16))
    except OSError:
        return


def silent(handler: Handler, data: bytes, until: threading.Event) -> bytes:
    if is_slice(handler):
        until.wait(60)
    return data


def trickling(handler: Handler, data: bytes, until: threading.Event) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    for at in range(len(data)):
        if until.wait(0.05):
            return
        try:
            handler.wfile.write(data[at : at + 1])
        except OSError:
            return


def answers(status: int, **headers: str) -> Callable[[Handler, bytes], None]:
    body = b'{"error": {"message": "said by the source"}}'
    return lambda handler, data: answer(handler, body, status, **headers)


def lists(**fields: Any) -> Callable[[Handler, bytes], bytes]:
    """Change fields of the list, or of its one file."""

    def changed(handler: Handler, data: bytes) -> bytes:
        if is_slice(handler):
            return data
        found = json.loads(data)
        for name, value in fields.items():
            (found["files"][0] if name in found["files"][0] else found)[name] = value
        return json.dumps(found).encode()

    return changed


FAULTS: dict[str, tuple[Any, str]] = {
    "other bytes": (flipped, "has other bytes from 0 on than announced"),
    "too few bytes": (shorter, "bytes came instead of"),
    "a broken reply": (broken_off, "a reply broke off"),
    "an endless reply": (endless, "None bytes came"),
    "garbage": (lambda handler, data: b"{", "its list is not read"),
    "another version": (lists(version="v2"), "it has version 'v2'"),
    "no files": (lists(files=[]), "no files of weights"),
    "a path as a name": (lists(name="../model.safetensors"), "no files of weights"),
    "another kind of file": (lists(name="run.py"), "no files of weights"),
    "too few digests": (lists(digests=[]), "no files of weights"),
    "a removed version": (answers(409), "HTTP 409, said by the source"),
    "a refused key": (answers(403), "HTTP 403, said by the source"),
    "a redirect": (answers(302, Location="http://127.0.0.1:1/"), "HTTP 302"),
}


def refused(taker: Pushable, *sources: str, **fields: Any) -> str:
    """Return the reason of a refused pull, which changed nothing."""
    before = taker.engine.pushes.state().target, taker.checksums()
    said = why(pulled(taker, *sources, **fields))
    assert (taker.engine.pushes.state().target, taker.checksums()) == before
    return said


def works(taker: Pushable, *sources: str, **fields: Any) -> None:
    """Pull, and roll back."""
    report = pulled(taker, *sources, **fields)
    assert report.result == "committed", why(report)
    assert taker.roll_back().result == "rolled_back"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_source_is_left_for_the_next(
    taker: Pushable, source: Source, server: LiveServer, fault: str
) -> None:
    source.spoil, reason = FAULTS[fault]
    said = refused(taker, source.url)
    assert said.startswith("channel_broken: no server gave version 'v1' of the target")
    assert source.url in said and reason in said
    works(taker, source.url, server.url)


@pytest.mark.parametrize(
    ("fault", "limit", "reason"),
    [(silent, "SILENT_S", "timed out"), (trickling, "SLOW_S", "took longer than 0.2 s")],
)
def test_a_source_that_gives_nothing_in_time_is_left(
    taker: Pushable,
    source: Source,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[..., Any],
    limit: str,
    reason: str,
) -> None:
    until = threading.Event()
    source.spoil = partial(fault, until=until)
    monkeypatch.setattr(peer, limit, 0.2)
    assert reason in refused(taker, source.url)
    until.set()


def test_tensors_of_another_version_are_never_installed(taker: Pushable, source: Source) -> None:
    source.spoil = lists(digest="f" * 64)
    said = refused(taker, source.url)
    assert said.startswith("weights_refused: the target's tensors have the digest")


def test_content_is_what_the_fleet_has_committed(
    taker: Pushable, given: Pushable, source: Source, root: Path
) -> None:
    """A source whose start directory was overwritten does not know the digest of its files."""
    wanted = digests(given.look())["target"]
    source.content = (root / "base" / SINGLE).read_bytes()
    said = refused(taker, source.url, digest=wanted)
    assert said.startswith("weights_refused: the target's tensors have the digest")
    source.content = (root / "new" / SINGLE).read_bytes()
    works(taker, source.url, digest=wanted)


def test_files_that_hold_no_weights_are_left_for_the_next(
    taker: Pushable, source: Source, server: LiveServer
) -> None:
    source.content = source.content[:-1]
    assert "not a whole safetensors file" in refused(taker, source.url)
    works(taker, source.url, server.url)


@pytest.mark.parametrize("same", [True, False])
def test_next_source_gives_only_what_the_lost_one_did_not(
    taker: Pushable, source: Source, root: Path, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    monkeypatch.setattr(peer, "SLICE_BYTES", 2**14)
    monkeypatch.setattr(peer, "CONNECTIONS", 1)
    lost = {f"start={number * 2**14}" for number in range(2, 100)}

    def removed(handler: Handler, data: bytes) -> bytes | None:
        if lost & {*handler.path.split("&")}:
            return answer(handler, b"{}", 409)
        return data

    source.spoil = removed
    written = save(load_file(root / "new" / SINGLE), {"format": "other"})
    other = Source(source.content if same else written)
    assert len(source.content) > 4 * 2**14
    works(taker, source.url, other.url)
    starts = [path for path in other.asked if "start=" in path]
    kept = 2 if same else 0
    assert len(starts) == len(other.list()["files"][0]["digests"]) - kept
    other.close()


def test_a_busy_source_is_asked_again(taker: Pushable, source: Source) -> None:
    def busy(handler: Handler, data: bytes) -> bytes | None:
        if len(source.asked) < 3:
            return answer(handler, b"", 503, Retry_After="0")
        return data

    source.spoil = busy
    works(taker, source.url)
    assert len(source.asked) >= 3


def test_an_abort_ends_a_pull_that_waits(taker: Pushable, source: Source) -> None:
    reached, until = threading.Event(), threading.Event()

    def waits(handler: Handler, data: bytes) -> bytes:
        if is_slice(handler):
            reached.set()
            until.wait(60)
        return data

    source.spoil = waits
    id = taker.send_push(source.url, "v1", channel="peer", key=KEY)
    taker.until(reached.is_set, "request of a slice")
    assert taker.abort("v1").result == "aborted"
    assert "conflict: the push of version 'v1' was aborted" in why(taker.report(id))
    assert not until.is_set()
    until.set()
    source.spoil = lambda handler, data: data
    works(taker, source.url)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "ftp://a",
        "http://",
        "http://a:x",
        "http://a/b",
        "http://a?b",
        "file:///etc",
        "//a",
        "http://user:password@a",
        "http://a http://b#c",
    ],
)
def test_sources_are_plain_http_addresses(path: str) -> None:
    with pytest.raises(ContentRefused) as caught:
        sources_of(path)
    assert "password" not in str(caught.value)
    assert sources_of(" https://a:1 http://[::1]:2/ ") == ["https://a:1", "http://[::1]:2/"]


def test_tensors_of_a_manifest_are_checked(taker: Pushable, source: Source, root: Path) -> None:
    tensors = [{"name": name} for name in load_file(root / "new" / SINGLE)]
    wrong = [{**tensors[0], "checksum": "mix64:0000000000000000"}, *tensors[1:]]
    for given, reason in ((wrong, "checksum"), (tensors[1:], "not in the manifest")):
        said = why(pulled(taker, source.url, tensors=given))
        assert said.startswith("weights_refused") and reason in said
    assert pulled(taker, source.url, tensors=tensors).result == "committed"
    assert taker.roll_back().result == "rolled_back"
