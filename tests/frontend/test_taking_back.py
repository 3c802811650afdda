"""A push by http that fails or is interrupted leaves nothing that keeps the next one out, and ends
nothing of others.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frontend.live_server import LiveServer, live_server
from tlt_client import Client, ConnectionFailed
from tlt_client.channels.http import HttpSender
from tlt_client.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    PushFailed,
    ServerError,
    StorageFailed,
    WeightsRefused,
)
from tlt_server.__main__ import main
from tlt_server.wire.commands import AbortWeights

TENSORS = {f"w{count}": torch.full((64,), float(count)) for count in range(4)}
FILE_BYTES = 300  # so that each tensor has a part of its own
PART = "part-00001.safetensors"


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    state = tmp_path_factory.mktemp("state")
    with live_server(model, state_dir=state, weight_channels="http", max_uploads=2) as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[Client]:
    """Return a client of the server without uploads, whose engine takes every push."""
    server.engine.fails, server.engine.reads = "", True
    server.engine.weight_commands.clear()
    with Client(server.url, timeout_s=30) as client:
        for upload in client.weights()["uploads"]:
            client.abort_weights(upload["version"], upload_only=True)
        yield client


def sender(client: Client) -> HttpSender:
    return HttpSender(client, max_file_bytes=FILE_BYTES, sleep=lambda s: None)


def stopping(error: BaseException) -> Iterator[tuple[str, torch.Tensor]]:
    for count, item in enumerate(TENSORS.items()):
        if count == 3:
            raise error
        yield item


def there(client: Client, version: str) -> bool:
    try:
        client.weights_part(version, PART)
    except NotFound:
        return False
    return True


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(1), RuntimeError("out of memory"), GeneratorExit()]
)
def test_push_interrupted_in_its_iterator_frees_its_upload(
    error: BaseException, client: Client
) -> None:
    for run in ("a", "b", "c"):  # more than max_uploads
        with pytest.raises(type(error)) as raised:
            sender(client).push(stopping(error), run)
        assert raised.value is error and not there(client, run)
    assert sender(client).push(TENSORS.items(), "d")["state"] == "committed"


def test_refused_manifests_free_their_uploads(client: Client, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(TENSORS, tmp_path / "model.safetensors")
    for run in ("a", "b"):
        with pytest.raises(InvalidRequest, match="inflight"):
            sender(client).push(TENSORS.items(), run, inflight="abort")
        with pytest.raises(InvalidRequest, match="inflight"):
            sender(client).push_directory(tmp_path, run, inflight="abort")
    assert sender(client).push(TENSORS.items(), "c")["state"] == "committed"


def test_retryable_error_keeps_uploaded_parts_for_a_retry(
    client: Client, server: LiveServer
) -> None:
    ours = sender(client)
    for error in (
        ConnectionFailed("gone"),
        PushFailed("push_failed", "", status=500, retryable=True),
    ):
        with pytest.raises(type(error)):
            ours.push(stopping(error), "a")
        assert there(client, "a")
    server.engine.fails = "push_failed"
    with pytest.raises(PushFailed):
        ours.push(TENSORS.items(), "a")
    assert there(client, "a")
    with pytest.raises(KeyboardInterrupt):
        ours.push(stopping(KeyboardInterrupt()), "a")
    assert not there(client, "a")


def test_failed_push_keeps_uploads_of_other_senders(client: Client) -> None:
    client.put_weights("a", PART, b"other bytes", start=0, total=20)
    with pytest.raises(Conflict, match="started with 20 bytes"):
        sender(client).push(TENSORS.items(), "a")
    assert client.weights_part("a", PART)["bytes"] == 11
    client.put_weights("b", "theirs.safetensors", b"abc", start=0, total=20)
    with pytest.raises(KeyboardInterrupt):
        sender(client).push(stopping(KeyboardInterrupt()), "b")
    assert client.weights_part("b", "theirs.safetensors")["bytes"] == 3


def test_interrupted_sender_does_not_abort_a_started_push(
    client: Client, server: LiveServer
) -> None:
    """Another client pushes the version by any channel; taking an upload back reaches no engine."""
    server.engine.fails, server.engine.reads = "conflict", False
    with pytest.raises(Conflict):
        sender(client).push(TENSORS.items(), "a")
    assert not there(client, "a")
    assert not [
        command for command in server.engine.weight_commands if isinstance(command, AbortWeights)
    ]
    with pytest.raises(NotFound, match="version 'a' has no upload"):
        client.abort_weights("a", upload_only=True)


def test_failed_abort_does_not_hide_the_original_error(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()

    def fails(version: str = "", *, upload_only: bool = False) -> Any:
        asked.append(version)
        raise ConnectionFailed("the server is gone")

    monkeypatch.setattr(client, "abort_weights", fails)
    with pytest.raises(RuntimeError, match="the trainer's own"):
        sender(client).push(stopping(RuntimeError("the trainer's own")), "a")
    assert asked == ["a"]


@pytest.mark.parametrize(
    "code, reads, stays",
    [
        ("conflict", False, True),
        ("conflict", True, False),
        ("push_failed", True, True),
        ("weights_refused", True, False),
    ],
)
def test_server_keeps_uploaded_parts_for_a_later_push(
    code: str, reads: bool, stays: bool, client: Client, server: LiveServer
) -> None:
    """A conflict before they were read is one with another push; afterwards it is with what they
    hold.
    """
    client.put_weights("a", PART, b"abc", start=0, total=3)
    server.engine.fails, server.engine.reads = code, reads
    with pytest.raises((Conflict, PushFailed, WeightsRefused)):
        client.push_weights("a", channel="http", tensors=[{"name": "w", "checksum": "xxh3:0"}])
    assert there(client, "a") == stays


def test_upload_without_bytes_takes_no_upload_slot(client: Client) -> None:
    for version in ("a", "b", "c"):  # more than max_uploads
        with pytest.raises(Conflict, match="send from 0"):
            client.put_weights(version, PART, b"abc", start=5, total=100)
    assert client.put_weights("d", PART, b"abc", start=0, total=100)["begins"]
    assert not client.put_weights("d", PART, b"abc", start=0, total=100)["begins"]


def test_open_uploads_are_listed(
    client: Client, server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert client.weights()["uploads"] == []
    client.put_weights("run-1", PART, b"abc", start=0, total=100)
    client.put_weights("run-1", "part-00002.safetensors", b"abcd", start=0, total=4)
    client.put_weights("run-2", PART, b"a", start=0, total=1)
    first, second = client.weights()["uploads"]
    assert (first["version"], first["parts"], first["bytes"]) == ("run-1", 2, 7)
    assert first["total"] == 104
    assert second["version"] == "run-2"
    assert first["age_s"] >= first["idle_s"] >= 0 and first["age_s"] >= second["age_s"]
    assert main(["weights", "status", "--url", server.url]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "upload: 'run-1', 2 parts, 7 of 104 bytes, started" in said
    assert "abort VERSION ends it" in said
    client.abort_weights("run-1", upload_only=True)
    assert [upload["version"] for upload in client.weights()["uploads"]] == ["run-2"]


def test_full_upload_limit_names_the_open_uploads(client: Client) -> None:
    for version in ("a", "b"):
        client.put_weights(version, PART, b"abc", start=0, total=100)
    with pytest.raises(StorageFailed, match=r"push or abort one of \['a', 'b'\]") as full:
        sender(client).push(TENSORS.items(), "c")
    assert isinstance(full.value, ServerError) and there(client, "a") and there(client, "b")
