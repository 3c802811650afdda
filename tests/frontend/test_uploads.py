"""Parts uploaded over HTTP: resumed, bounded, compared with earlier bytes; then a manifest pushes
them once.
"""

import asyncio
import os
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.frontend.live_server import LiveServer, live_server, server_and_client
from tests.waiting import in_loop, until
from tlt_client import Client, ServerError
from tlt_server.errors import Conflict, NotFound
from tlt_server.frontend.weights import uploads
from tlt_server.frontend.weights.uploads import Uploads

PART = "part-1.safetensors"
TENSORS = [{"name": "w", "checksum": "sha256:0"}]


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    settings: dict[str, Any] = {"max_uploads": 2, "max_upload_parts": 2, "max_upload_mb": 1}
    state = tmp_path_factory.mktemp("state")
    with live_server(model, state_dir=state, weight_channels="http", **settings) as running:
        yield running


@pytest.fixture
def server(running: LiveServer) -> LiveServer:
    """Return the server without uploads, whose engine takes every push."""
    running.engine.fails, running.engine.reads = "", True
    with Client(running.url, timeout_s=30) as client:
        for upload in client.weights()["uploads"]:
            client.abort_weights(upload["version"], upload_only=True)
    assert emptied(running)
    running.engine.weight_commands.clear()
    return running


@pytest.fixture
def client(server: LiveServer) -> Iterator[Client]:
    with Client(server.url, timeout_s=30) as client:
        yield client


def put(
    client: Client,
    data: bytes,
    *,
    start: int = 0,
    total: int = 100,
    version: str = "v1",
    part: str = PART,
) -> int:
    return int(client.put_weights(version, part, data, start=start, total=total)["bytes"])


def refused(call: Any, *words: str, status: int) -> None:
    with pytest.raises(ServerError) as error:
        call()
    assert error.value.status == status, error.value
    for word in words:
        assert word in error.value.message


def kept(server: LiveServer) -> list[Path]:
    assert server.config.state_dir is not None
    walked = os.walk(
        server.config.state_dir / "uploads"
    )  # no error where a thread removes a directory meanwhile
    return sorted(Path(directory, name) for directory, _, names in walked for name in names)


def emptied(server: LiveServer) -> bool:
    """Wait for the thread that removes files."""
    until(lambda: not kept(server))
    return True


def test_part_uploaded_in_ranges_is_pushed_once(client: Client, server: LiveServer) -> None:
    data = bytes(range(100))
    assert put(client, data[:40]) == 40 and put(client, data[20:60], start=20) == 60
    assert put(client, data[:10]) == 60
    assert client.weights_part("v1", PART) == {
        "part": PART,
        "bytes": 60,
        "total": 100,
        "begins": False,
    }
    refused(
        lambda: client.push_weights("v1", channel="http", tensors=TENSORS),
        "60 of 100 bytes",
        status=409,
    )
    assert put(client, data[60:], start=60) == 100
    (file,) = kept(server)
    assert file.read_bytes() == data
    assert client.push_weights("v1", channel="http", tensors=TENSORS)["state"] == "committed"
    [pushed] = server.engine.manifests
    assert (pushed.channel, pushed.path) == ("http", file.parent.name) and emptied(server)
    refused(lambda: client.weights_part("v1", PART), "first byte", status=404)


def test_removing_many_bytes_delays_no_upload(
    client: Client, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed, go_on = list[Path](), threading.Event()

    def slowly(directory: Path, *, ignore_errors: bool) -> None:
        assert ignore_errors and go_on.wait(20)
        removed.append(directory)

    monkeypatch.setattr(uploads.shutil, "rmtree", slowly)
    put(client, b"a" * 50, total=2**19)
    assert client.abort_weights("v1")["state"] == "aborted", "answered while the files are there"
    refused(
        lambda: put(client, b"b" * 10, total=2**19 + 1), "max_upload_mb", status=507
    )  # they still take room
    assert put(client, b"b" * 10) == 10 and not removed
    go_on.set()
    until(lambda: removed)
    old, new = sorted(kept(server), key=lambda file: file.stat().st_size, reverse=True)
    assert old.read_bytes() == b"a" * 50 and old.parent == removed[0]
    assert new.read_bytes() == b"b" * 10
    monkeypatch.undo()
    shutil.rmtree(removed[0])


def test_part_uploaded_whole_needs_no_range(client: Client, server: LiveServer) -> None:
    reply = httpx.put(f"{server.url}/weights/v1/{PART}", content=b"abc")
    assert reply.json() == {"part": PART, "bytes": 3, "total": 3, "begins": True}
    assert kept(server)[0].read_bytes() == b"abc"


def test_upload_refuses_changed_bytes_gaps_and_sizes(client: Client, server: LiveServer) -> None:
    put(client, b"a" * 50)
    refused(lambda: put(client, b"b" * 10, start=45), "other bytes", status=409)
    refused(lambda: put(client, b"a" * 10, start=60), "send from 50", status=409)
    refused(lambda: put(client, b"a" * 10, total=99), "started with 100", status=409)
    assert client.weights_part("v1", PART)["bytes"] == 50
    assert kept(server)[0].read_bytes() == b"a" * 50
    assert client.abort_weights("v1")["state"] == "aborted" and emptied(server)
    assert put(client, b"b" * 10) == 10, "after an abort it begins again"


RANGES = ("5-3/9", "0-9/9", "0-1/9", "*/9", "0-2/" + "9" * 30)
NO_RANGE, NO_PART = "FIRST-LAST/TOTAL", "ending in .safetensors, or calibration.json"
NO_VERSION = "it must have 1 to 256 characters"
NO_PARTS = ("config.json", "model", ".safetensors", "..safetensors", "%2e%2e%5cx.safetensors")
MALFORMED: list[tuple[str, str, str]] = [  # path, range, what is said of it
    *((f"v1/{PART}", header, NO_RANGE) for header in ("0-2/3", *(f"bytes {at}" for at in RANGES))),
    *((f"v1/{part}", "", NO_PART) for part in (*NO_PARTS, "x" * 140 + ".safetensors")),
    ("v1/calibration.json.safetensors.json", "", NO_PART),
    *((f"{version}/{PART}", "", NO_VERSION) for version in ("v%01", "v" * 257)),
]


def test_malformed_ranges_parts_and_versions_store_no_byte(server: LiveServer) -> None:
    for path, header, said in MALFORMED:
        headers = {"content-range": header} if header else {}
        reply = httpx.put(f"{server.url}/weights/{path}", content=b"abc", headers=headers)
        assert reply.status_code == 400, (path, header)
        assert said in reply.json()["error"]["message"], (path, header)
    assert kept(server) == []


def test_versions_parts_and_bytes_are_bounded(client: Client) -> None:
    put(client, b"a")
    put(client, b"a", part="part-2.safetensors")
    refused(
        lambda: put(client, b"a", part="part-3.safetensors"),
        "2 parts",
        "max_upload_parts",
        status=507,
    )
    refused(
        lambda: put(client, b"a", version="v2", total=2**20),
        "limit is 1 MiB",
        "max_upload_mb",
        status=507,
    )
    put(client, b"a", version="v2")
    refused(lambda: put(client, b"a", version="v3"), "max_uploads", "['v1', 'v2']", status=507)
    client.abort_weights("v1")
    assert put(client, b"a", version="v3") == 1


def test_an_unpushed_upload_is_removed(model: Path, tmp_path: Path) -> None:
    left = tmp_path / "state" / "uploads" / "old" / PART
    left.parent.mkdir(parents=True)
    left.write_bytes(b"abc")
    with server_and_client(
        model, state_dir=tmp_path / "state", weight_channels="http", upload_ttl_s=1
    ) as (server, client):
        assert kept(server) == []
        put(client, b"a")
        assert emptied(server)


def test_parts_need_the_http_channel(model: Path) -> None:
    with server_and_client(model) as (server, client):
        refused(lambda: put(client, b"a"), "--weight-channels", status=403)
        refused(lambda: client.weights_part("v", PART), "--weight-channels", status=403)


def test_spoiled_weights_are_not_served_until_the_next_push(
    client: Client, server: LiveServer
) -> None:
    spoiled = [{"name": "w", "dtype": "float32", "shape": [1]}]
    refused(
        lambda: client.push_weights("v1", channel="broadcast", group="spoils", tensors=spoiled),
        status=424,
    )
    assert not client.is_ready() and "half of it" in httpx.get(f"{server.url}/readyz").text
    assert "tlt_weights_quarantined 1.0" in client.metrics()
    refused(
        lambda: client.generate([{"token_ids": [5]}]), "half of it is another version", status=503
    )
    put(client, b"abc", total=3)
    assert client.push_weights("v1", channel="http", tensors=TENSORS)["state"] == "committed"
    assert client.is_ready() and "tlt_weights_quarantined 0.0" in client.metrics()


def test_unwritable_upload_takes_no_upload_slot(client: Client, server: LiveServer) -> None:
    assert server.config.state_dir is not None
    directory = server.config.state_dir / "uploads"
    directory.rmdir()
    for count in range(3):  # more than max_uploads
        refused(
            lambda version=f"v{count}": put(client, b"1", version=version),
            "cannot be written below the state directory",  # type: ignore[misc]
            status=507,
        )
    directory.mkdir()
    assert put(client, b"12", version="v0") == 2


# pieces, as one comes while the one before is written

PIECE = 4  # bytes


class Slow(Uploads):
    """Writes a piece when it may."""

    def __init__(self, root: Path) -> None:
        super().__init__(
            SimpleNamespace(
                state_dir=root, max_uploads=1, max_upload_parts=1, max_upload_mb=1, upload_ttl_s=600
            )
        )  # type: ignore[arg-type]
        self.root, self.may, self.begun = root, threading.Event(), 0

    def _put(self, *args: Any) -> None:
        self.begun += 1
        assert self.may.wait(60)
        super()._put(*args)

    @property
    def written(self) -> list[bytes]:
        assert self._removing.mark().wait(60)
        return [path.read_bytes() for path in self.root.rglob(PART)]


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slow:
    monkeypatch.setattr(uploads, "PIECE_BYTES", PIECE)

    return Slow(tmp_path)


@in_loop
async def test_next_piece_is_received_while_one_is_written(slow: Slow) -> None:
    taken: list[int] = []

    async def body() -> AsyncIterator[bytes]:
        for count in range(4):
            taken.append(count)
            yield bytes([count]) * PIECE

    sending = asyncio.create_task(slow.write("v", PART, 0, 4 * PIECE, body()))
    async with asyncio.timeout(30):
        while taken != [0, 1] or not slow.begun:  # noqa: ASYNC110 (a thread counts)
            await asyncio.sleep(0.001)
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert taken == [0, 1] and slow.begun == 1
    slow.may.set()
    assert (await sending).bytes == 4 * PIECE
    assert slow.written == [b"".join(bytes([count]) * PIECE for count in range(4))]


@in_loop
async def test_bytes_before_a_break_are_kept(slow: Slow) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"abcd"
        yield b"ef"
        asyncio.get_running_loop().call_later(0.05, slow.may.set)
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await slow.write("v", PART, 0, 100, body())
    assert slow.status("v", PART).bytes == 6
    assert slow.written == [b"abcdef"]


@in_loop
@pytest.mark.parametrize("before", [b"", b"AAAA"])
async def test_late_bytes_of_an_ended_upload_change_no_later_upload(
    before: bytes, slow: Slow
) -> None:
    slow.may.set()

    async def body(data: bytes) -> AsyncIterator[bytes]:
        yield data

    may_come = asyncio.Event()

    async def late() -> AsyncIterator[bytes]:
        await may_come.wait()
        yield b"EVIL"

    await slow.write("v", PART, 0, 100, body(before))
    writing = asyncio.create_task(slow.write("v", PART, len(before), 100, late()))
    await asyncio.sleep(0)
    assert slow.drop("v")
    await slow.write("v", PART, 0, 8, body(b"goodgood"))
    assert slow.seal("v").upload is not None
    may_come.set()
    with pytest.raises(Conflict, match="ended meanwhile"):
        await writing
    assert slow.status("v", PART).bytes == 8
    assert slow.written == [b"goodgood"]


@in_loop
async def test_parts_stay_until_the_last_push_reading_them_ends(slow: Slow) -> None:
    slow.may.set()
    early = slow.seal("v")  # no part of it is there
    await slow.write("v", PART, 0, 4, body())
    one, other = slow.seal("v"), slow.seal("v")
    slow.release("v", early, keep=False)
    slow.release("v", one, keep=False)
    assert slow.status("v", PART).bytes == 4, "the other one reads"
    assert not slow.forget("v") and not slow.drop("v") and slow.status("v", PART).bytes == 4
    slow.release("v", other, keep=True)
    with pytest.raises(NotFound):
        slow.status("v", PART)


@in_loop
async def test_abort_while_parts_are_read_removes_parts_after_the_push(slow: Slow) -> None:
    slow.may.set()
    await slow.write("v", PART, 0, 4, body())
    for aborts in (False, True):
        sealed = slow.seal("v")
        assert not (aborts and slow.drop("v"))
        slow.release("v", sealed, keep=True)
        assert (slow.listed() == []) == aborts


async def body() -> AsyncIterator[bytes]:
    yield b"abcd"


@in_loop
async def test_a_refused_piece_ends_the_range(slow: Slow) -> None:
    slow.may.set()

    async def body(data: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(data), PIECE):
            yield data[start : start + PIECE]

    await slow.write("v", PART, 0, 100, body(b"abcdefgh"))
    with pytest.raises(Conflict, match="other bytes"):
        await slow.write("v", PART, 0, 100, body(b"abcdefXhijkl"))
    assert slow.status("v", PART).bytes == 8
    assert slow.written == [b"abcdefgh"]


def test_idle_uploads_of_one_key_make_room_for_a_second_key(model: Path, tmp_path: Path) -> None:
    keys = "a scopes=push-weights name=a\nb scopes=push-weights name=b\n"
    with live_server(
        model,
        state_dir=tmp_path / "state",
        weight_channels="http",
        max_uploads=2,
        max_upload_mb=1,
        keys=keys,
    ) as server:

        def status(key: str, version: str, total: int = 8) -> int:
            return httpx.put(
                f"{server.url}/weights/{version}/{PART}",
                content=b"x" * 8,
                headers={"authorization": f"Bearer {key}", "content-range": f"bytes 0-7/{total}"},
            ).status_code

        def versions() -> list[str]:
            reply = httpx.get(f"{server.url}/weights", headers={"authorization": "Bearer a"})
            return [upload["version"] for upload in reply.json()["uploads"]]

        assert [status("a", "v1"), status("a", "v2"), status("a", "v3")] == [200, 200, 507]
        assert status("b", "v4") == 200 and versions() == ["v2", "v4"]
        assert status("a", "v5") == status("b", "v5") == 507, "both have their share"
