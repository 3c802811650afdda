"""Labels of versions in the replies of the borrowed dialects; the native one shows names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.frontend.live_server import LiveServer, live_server
from tlt_server.wire.events import WeightState

NAME = "1~0123456789ab"


@pytest.fixture
def server(model: Path) -> Iterator[LiveServer]:
    with live_server(model, engine={"weights": WeightState(target=NAME)}) as running:
        yield running


def test_borrowed_replies_show_labels_and_native_ones_names(server: LiveServer) -> None:
    for path in ("/weight_info", "/get_weight_version", "/model_info", "/server_info"):
        assert httpx.get(server.url + path, timeout=10).json()["weight_version"] == "1", path

    def post(path: str, body: dict[str, Any]) -> Any:
        return httpx.post(server.url + path, json=body, timeout=10).json()

    meta = post("/generate", {"input_ids": [65], "sampling_params": {"max_new_tokens": 1}})[
        "meta_info"
    ]
    assert meta["weight_version"] == "1" and meta["weight_versions"][0]["version"] == NAME
    assert httpx.get(server.url + "/weights", timeout=10).json()["target"] == NAME
    ended = post("/update_weights_from_disk", {"model_path": "p", "weight_version": NAME})
    assert ended["message"] == "committed: version 1" and ended["new_version"] == "1"
    post("/update_weights", {"weight_dir": "p", "weight_version": "2"})
    post("/update_weights", {"path": "p", "version": "3"})
    manifests = [
        command.manifest
        for command in server.engine.weight_commands
        if hasattr(command, "manifest")
    ]
    assert [(each.version, each.labelled) for each in manifests] == [
        (NAME, True),
        ("2", True),
        ("3", False),
    ]
