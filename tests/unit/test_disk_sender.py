"""The trainer's half of disk, in front of a client that reads the directory it is given: any state
dict, and a directory that no other push uses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tlt_client.channels.disk import DiskSender


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


def test_what_a_killed_trainer_left_is_in_nobodys_way(
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
