"""Tensors that a trainer pushes are checked by every channel before a server hears of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tlt_client.channels import Sender
from tlt_client.channels.broadcast import BroadcastSender
from tlt_client.channels.disk import DiskSender
from tlt_client.channels.errors import ContentRefused
from tlt_client.channels.groups import WeightGroup
from tlt_client.channels.http import HttpSender
from tlt_client.channels.ipc import IpcSender
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
        (list, "there are no tensors; push a state dict .*, and an iterator only once"),
        (lambda: iter(()), "there are no tensors; push a state dict .*, and an iterator only once"),
        (dict, "there are no tensors"),
        (
            lambda: [*TENSORS.items(), ("a", torch.ones(1))],
            "tensor 'a' comes twice; push each tensor once",
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


def test_a_state_dict_is_its_items(sender: Sender, server: Server) -> None:
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
