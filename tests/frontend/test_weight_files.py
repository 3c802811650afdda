"""The files of committed weights, which other servers of a fleet take from this one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.frontend.live_server import LiveServer, live_server
from tlt_client import Client
from tlt_client.channels.checkpoint import ADAPTER_CONFIG, CALIBRATION, INDEX, SINGLE
from tlt_client.channels.checksums import xxh3
from tlt_client.channels.peer import SLICE_BYTES
from tlt_server.config import Config
from tlt_server.errors import StartupError
from tlt_server.frontend.weights import files
from tlt_server.wire.kept import CURRENT, WEIGHTS, Current, KeptVersion

KEYS = "fleet scopes=link name=fleet\ntrainer scopes=data,push-weights,operate name=trainer\n"
FLEET = {"authorization": "Bearer fleet"}
DATA = os.urandom(2 * SLICE_BYTES + 77)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    state = tmp_path_factory.mktemp("state")
    with live_server(model, keys=KEYS, state_dir=state, weight_channels="http") as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_committed(server: LiveServer) -> Iterator[None]:
    yield
    (spool(server) / CURRENT).unlink(missing_ok=True)
    server.service.takers._seen.clear()


def spool(server: LiveServer) -> Path:
    assert server.config.state_dir is not None
    directory = server.config.state_dir / WEIGHTS
    directory.mkdir(exist_ok=True)
    return directory


def commit(server: LiveServer, **roles: KeptVersion) -> None:
    current = Current(model="", roles=roles)
    (spool(server) / CURRENT).write_bytes(msgspec.json.encode(current))


def kept(server: LiveServer, version: str = "v0", **content: bytes) -> Path:
    """Commit a target with these files; `_` stands for the dot before `safetensors`."""
    place = spool(server) / "push-1" / "target"
    place.mkdir(parents=True, exist_ok=True)
    for old in place.iterdir():
        old.unlink()
    for name, data in content.items():
        (place / f"{name}.safetensors").write_bytes(data)
    commit(server, target=KeptVersion(version=version, digest="d", directory="push-1/target"))
    return place


def ask(server: LiveServer, path: str = "", key: str = "fleet", **given: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.get(f"{server.url}/weights/files{path}", params=given, headers=headers)


def test_files_of_a_committed_version_come_in_slices(server: LiveServer) -> None:
    place = kept(server, a=DATA, b=b"small")
    (place / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    (place / CALIBRATION).write_bytes(b"{}")
    listing = ask(server, version="v0").raise_for_status().json()
    pieces = [DATA[at : at + SLICE_BYTES] for at in range(0, len(DATA), SLICE_BYTES)]
    sums = [xxh3(memoryview(piece)) for piece in pieces]
    assert listing == {
        "role": "target",
        "version": "v0",
        "digest": "d",
        "files": [
            {"name": "a.safetensors", "bytes": len(DATA), "digests": sums},
            {"name": CALIBRATION, "bytes": 2, "digests": [xxh3(memoryview(b"{}"))]},
        ],
    }
    found = [
        ask(server, "/target/a.safetensors", start=at).raise_for_status().content
        for at in range(0, len(DATA), SLICE_BYTES)
    ]
    assert found == pieces
    assert ask(server, "/target/a.safetensors", start=len(DATA)).content == b""


def test_weights_never_pushed_come_from_the_models_directory(server: LiveServer) -> None:
    listing = ask(server).json()
    names = {path.name for path in server.config.model.glob("*.safetensors")}
    assert listing["version"] == "v0" and listing["digest"] == ""
    assert {file["name"] for file in listing["files"]} == names


def test_other_versions_roles_and_names_are_refused(server: LiveServer) -> None:
    kept(server, a=b"one")
    replaced = ask(server, "/target/a.safetensors", version="v1")
    assert replaced.status_code == 409 and "'v1' of the target is not live" in replaced.text
    assert ask(server, "/target/gone.safetensors").status_code == 409
    for name in ("config.json", "%2e%2e%2f", "..%2Fcurrent.json", CURRENT):
        assert ask(server, f"/target/{name}").status_code == 404
    assert ask(server, role="adapter", adapter="none").status_code == 404
    assert "there is no upload" in ask(server, role="all", version="v1").text
    assert ask(server, role="drafter").status_code == 409
    assert ask(server, "/mine/a.safetensors").status_code == 404


def test_no_trainer_may_push_by_peer(server: LiveServer, model: Path) -> None:
    body = {"version": "v1", "channel": "peer", "path": "http://127.0.0.1:1"}
    for given in (body, {**body, "key": "fleet"}):
        headers = {"authorization": "Bearer trainer"}
        refused = httpx.post(f"{server.url}/update_weights", json=given, headers=headers)
        assert refused.status_code == 400 and "peer" in refused.text
    assert not server.engine.weight_commands
    with pytest.raises(StartupError, match="weight_channels names 'peer'"):
        Config(model=model, weight_channels="peer").checked()


def test_files_need_the_scope_link(server: LiveServer) -> None:
    kept(server, a=b"one")
    for path in ("", "/target/a.safetensors"):
        assert ask(server, path, key="trainer").status_code == 403
        assert ask(server, path, key="guess").status_code == 401


def test_a_commit_in_between_is_answered_by_asking_again(server: LiveServer) -> None:
    kept(server, "v1", a=b"one")
    changing = ask(server, version="v1")
    assert changing.status_code == 503 and changing.headers["retry-after"]


def test_a_fifth_taker_is_asked_to_wait(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(server, a=b"one")
    monkeypatch.setattr(files, "TAKER_S", 600.0)
    for taker in ("a", "b", "c", "d", "a"):
        assert ask(server, taker=taker).status_code == 200
    for path in ("", "/target/a.safetensors"):
        refused = ask(server, path, taker="e")
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    monkeypatch.setattr(files, "TAKER_S", 0.0)
    assert ask(server, taker="e").status_code == 200


def test_a_changed_file_has_other_digests(server: LiveServer) -> None:
    place = kept(server, a=b"one")
    before = ask(server).json()["files"]
    (place / "a.safetensors").write_bytes(b"two!")
    assert ask(server).json()["files"] != before


def test_an_upload_is_given_while_it_is_pushed(server: LiveServer) -> None:
    uploads = server.service.uploads
    assert uploads is not None
    with Client(server.url, api_key="trainer") as trainer:
        trainer.put_weights("v9", "part-1.safetensors", b"sent", start=0, total=4)
    assert ask(server, role="all", version="v9").status_code == 404
    sealed = server.call(lambda: uploads.seal("v9"))
    listing = ask(server, role="all", version="v9").json()
    assert [file["name"] for file in listing["files"]] == ["part-1.safetensors"]
    part = ask(server, "/all/part-1.safetensors", version="v9")
    assert part.content == b"sent"
    server.call(lambda: uploads.release("v9", sealed, keep=False))
    assert ask(server, role="all", version="v9").status_code == 404


@pytest.mark.parametrize("kept", [False, True])
def test_a_server_without_a_spool_names_the_remedy(model: Path, tmp_path: Path, kept: bool) -> None:
    with live_server(model, state_dir=tmp_path if kept else None) as server:  # a gateway has one
        refused = ask(server)
    assert refused.status_code == 409 and "started with --state-dir" in refused.text


def test_only_an_indexs_tensor_files_are_listed(tmp_path: Path) -> None:
    for name in (SINGLE, "model-1.safetensors", "consolidated.safetensors", ADAPTER_CONFIG, "x"):
        (tmp_path / name).write_bytes(b"12")
    assert [*files.listed(tmp_path)] == [
        ADAPTER_CONFIG,
        "consolidated.safetensors",
        "model-1.safetensors",
        SINGLE,
    ]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "model-1.safetensors"}}))
    assert files.listed(tmp_path) == {ADAPTER_CONFIG: 2, "model-1.safetensors": 2}
