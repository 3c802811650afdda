"""The trainer's half of http and disk, and the checks of tensors that every channel makes before a
server hears of them.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load, load_file, save_file

from tlt_client.channels import Sender
from tlt_client.channels.broadcast import BroadcastSender
from tlt_client.channels.checkpoint import CALIBRATION
from tlt_client.channels.disk import DiskSender
from tlt_client.channels.errors import ContentRefused
from tlt_client.channels.groups import WeightGroup
from tlt_client.channels.http import HttpSender
from tlt_client.channels.ipc import IpcSender
from tlt_client.channels.tensors import raw
from tlt_client.errors import InvalidArgument, TltClientError

TENSORS = {"a": torch.arange(3.0), "b": torch.ones(2, 2)}
SENDERS: dict[str, Callable[[Any, Path], Sender]] = {
    "http": lambda client, root: HttpSender(client),
    "disk": lambda client, root: DiskSender(client, root),
    "ipc": lambda client, root: IpcSender(client),
    "broadcast": lambda client, root: BroadcastSender(client),
}


class Stop(Exception):
    """Raised once the push has been checked."""


class Done:
    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: Any) -> None:
        pass


class Communicator:
    def broadcast(self, tensors: Any, options: Any) -> Done:
        return Done()

    def abort(self) -> None:
        pass


class Server:
    """Keeps the names of the tensors that reach it."""

    def __init__(self) -> None:
        self.calls, self.names = list[str](), list[str]()

    def server_info(self) -> dict[str, Any]:
        return {}

    def join_group(self, name: str, **fields: Any) -> dict[str, Any]:
        return {}

    def leave_group(self, name: str) -> dict[str, Any]:
        return {}

    def put_weights(
        self, version: str, part: str, data: bytes, *, start: int, total: int
    ) -> dict[str, Any]:
        self.calls.append("put")
        return {"bytes": start + len(data)}

    def weights(self) -> dict[str, Any]:
        self.calls.append("weights")
        return {"sockets": ""}

    def push_weights(self, version: str, **fields: Any) -> dict[str, Any]:
        self.calls.append("push")
        self.names = [entry["name"] for entry in fields["tensors"]]
        return {"state": "committed"}


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture(params=SENDERS)
def sender(
    request: pytest.FixtureRequest, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Sender:
    monkeypatch.setattr(WeightGroup, "_made", lambda group: Communicator())
    return SENDERS[request.param](server, tmp_path)


@pytest.mark.parametrize(
    "given, says",
    [
        (list, "there are no tensors; push a state dict .* new iterator for each push"),
        (lambda: iter(()), "there are no tensors; push a state dict .* new iterator for each push"),
        (dict, "there are no tensors"),
        (
            lambda: [*TENSORS.items(), ("a", torch.ones(1))],
            "tensor 'a' is given twice; push each tensor once",
        ),
        (lambda: {"a": np.ones(3)}, "tensor 'a' is a ndarray; push torch tensors"),
        (
            lambda: torch.nn.Linear(2, 2),
            r"tensors is a Linear; push a state dict \(model.state_dict\(\)\)",
        ),
        (
            lambda: torch.nn.Linear(2, 2).parameters(),
            "tensors yields a Parameter instead of a name and a tensor",
        ),
        (lambda: ["a", "b"], "tensors yields a str instead of a name and a tensor"),
    ],
)
def test_push_without_tensors_is_refused_in_the_same_words(
    given: Any, says: str, sender: Sender, server: Server
) -> None:
    with pytest.raises(ContentRefused, match=says):
        sender.push(given(), "v")
    assert "push" not in server.calls


@pytest.mark.parametrize(
    "version, says",
    [
        (7, "version is 7 of type int; it must be text, such as 'run-7'"),
        (None, "of type NoneType"),
        ("run/7", "none of them '/' or a control or format character"),
        ("", "have 1 to 256 characters"),
    ],
)
def test_invalid_version_is_refused_before_reading_a_tensor(
    version: Any, says: str, sender: Sender, server: Server, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match=says):
        sender.push((Stop for _ in iter(int, 1)), version)  # type: ignore[misc]
    assert server.calls == [] and list(tmp_path.iterdir()) == []


def test_state_dict_is_pushed_like_its_items(sender: Sender, server: Server) -> None:
    for given in (
        TENSORS,
        TENSORS.items(),
        iter(TENSORS.items()),
        [list(item) for item in TENSORS.items()],
    ):
        server.names = []
        try:
            sender.push(given, "v")  # type: ignore[arg-type]
        except TltClientError as error:
            assert isinstance(sender, IpcSender)
            assert "start it with ipc" in str(error), "it came to the question for the sockets"
        else:
            assert server.names == list(TENSORS)


class Reads:
    """A client that reads the directory during the push."""

    def __init__(self) -> None:
        self.came: list[dict[str, torch.Tensor]] = []
        self.paths: list[str] = []
        self.said: list[dict[str, Any]] = []

    def push_weights(
        self, version: str, *, path: str, tensors: list[dict[str, Any]], **fields: Any
    ) -> dict[str, Any]:
        self.paths.append(path)
        self.came.append(
            {
                name: tensor
                for file in Path(path).glob("*.safetensors")
                for name, tensor in load_file(file).items()
            }
        )
        self.said += tensors
        return {}


class Killed(Reads):
    """A client whose push never returns, as in a trainer that is killed."""

    def push_weights(self, version: str, **fields: Any) -> dict[str, Any]:
        raise SystemExit


@pytest.mark.parametrize("max_file_bytes", [8, 2**20])
def test_names_sharing_storage_are_pushed_with_their_own_values(
    tmp_path: Path, max_file_bytes: int
) -> None:
    tied, half = torch.arange(6, dtype=torch.float32).reshape(2, 3), torch.arange(4.0)
    tensors = {
        "embedding": tied,
        "head": tied,
        "part": half[2:],
        "whole": half,
        "turned": tied.T,
        "scalar": torch.tensor(2),
    }
    told = Reads()
    DiskSender(told, tmp_path, max_file_bytes=max_file_bytes).push(tensors.items(), "v")  # type: ignore[arg-type]
    [came] = told.came
    assert came.keys() == tensors.keys() == {said["name"] for said in told.said}
    assert all(came[name].equal(tensors[name]) for name in tensors)
    assert list(tmp_path.iterdir()) == []


def test_files_left_by_a_killed_trainer_block_no_later_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as killed:
        killed.setattr("tlt_client.channels.disk.shutil.rmtree", lambda directory: None)
        with pytest.raises(SystemExit):
            DiskSender(Killed(), tmp_path).push([("w", torch.ones(2))], "step-1")  # type: ignore[arg-type]
    [left] = tmp_path.iterdir()
    told = Reads()
    DiskSender(told, tmp_path).push([("w", torch.zeros(2))], "step-1")  # type: ignore[arg-type]
    assert told.came[0]["w"].equal(torch.zeros(2)) and list(tmp_path.iterdir()) == [left]


CHUNK_BYTES = 2**16
LARGE = {
    "a": torch.arange(2**20, dtype=torch.float32),
    "b": torch.ones(3, dtype=torch.bfloat16),
    "c": torch.arange(2**21),
}


class Told:
    def __init__(self, *, keeps: bool) -> None:
        self._keeps, self.parts, self.manifest = keeps, dict[str, bytearray](), dict[str, Any]()

    def put_weights(
        self, version: str, part: str, data: bytes, *, start: int, total: int
    ) -> dict[str, Any]:
        assert len(data) == min(CHUNK_BYTES, total - start)
        if self._keeps:
            there = self.parts.setdefault(part, bytearray())
            assert len(there) == start
            there += data
        return {"bytes": start + len(data)}

    def push_weights(self, version: str, **manifest: Any) -> dict[str, Any]:
        self.manifest = manifest
        return {}


def test_parts_are_safetensors_and_manifest_has_checksums(tmp_path: Path) -> None:
    save_file(LARGE, tmp_path / "model.safetensors")
    by_tensors, by_files = Told(keeps=True), Told(keeps=True)
    HttpSender(by_tensors, max_file_bytes=2**23, chunk_bytes=CHUNK_BYTES).push(LARGE.items(), "v")  # type: ignore[arg-type]
    HttpSender(by_files, chunk_bytes=CHUNK_BYTES).push_directory(tmp_path, "v")  # type: ignore[arg-type]
    assert (len(by_tensors.parts), len(by_files.parts)) == (2, 1)
    for told in (by_tensors, by_files):
        came = {
            name: tensor
            for data in told.parts.values()
            for name, tensor in load(bytes(data)).items()
        }
        assert came.keys() == LARGE.keys()
        assert all(came[name].equal(LARGE[name]) for name in came)
        sums = {entry["name"]: entry["checksum"] for entry in told.manifest["tensors"]}
        assert sums == {
            name: f"xxh3:{xxhash.xxh3_128_hexdigest(raw(tensor))}" for name, tensor in LARGE.items()
        }


def test_directory_push_sends_calibration_but_names_only_tensors(tmp_path: Path) -> None:
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
        save_file({"b": LARGE["b"]}, tmp_path / name / "model.safetensors")
    (tmp_path / "drafter" / CALIBRATION).write_bytes(b"a table")
    alone, both = Told(keeps=True), Told(keeps=True)
    HttpSender(alone, chunk_bytes=CHUNK_BYTES).push_directory(tmp_path / "drafter", "v")  # type: ignore[arg-type]
    HttpSender(both, chunk_bytes=CHUNK_BYTES).push_directory(  # type: ignore[arg-type]
        tmp_path / "target", "v", drafter=tmp_path / "drafter"
    )
    assert alone.parts.keys() == {"model.safetensors", CALIBRATION}
    assert both.parts.keys() == {"model.safetensors", "drafter-model.safetensors", CALIBRATION}
    for told, names in ((alone, ["b"]), (both, ["b", "draft.b"])):
        assert told.parts[CALIBRATION] == b"a table"
        assert [entry["name"] for entry in told.manifest["tensors"]] == names


@pytest.mark.parametrize("max_file_bytes", [2**20, 2**30])
def test_push_memory_is_bounded_by_chunks_not_files(max_file_bytes: int) -> None:
    told = Told(keeps=False)
    sender = HttpSender(told, max_file_bytes=max_file_bytes, chunk_bytes=CHUNK_BYTES)  # type: ignore[arg-type]
    sender.push(list(LARGE.items())[:1], "warm")
    tracemalloc.start()
    try:
        sender.push(LARGE.items(), "v")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * CHUNK_BYTES < LARGE["a"].nbytes // 8


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16])
def test_unsupported_dtype_is_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(
        ContentRefused,
        match=f"tensor 'w' has dtype '{dtype}', which no channel carries; use one of",
    ):
        HttpSender(Told(keeps=False)).push([("w", torch.zeros(2, dtype=dtype))], "v")  # type: ignore[arg-type]
