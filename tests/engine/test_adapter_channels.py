"""LoRA adapters by every channel: the same tokens, from senders as trainers use them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file

from tests.engine.adapters import ALL, write_adapter
from tests.engine.channel_server import LONG_S, Server, in_group
from tlt_client.channels.broadcast import BroadcastSender
from tlt_client.channels.disk import DiskSender
from tlt_client.channels.http import HttpSender
from tlt_client.channels.ipc import IpcSender
from tlt_server.records import GenerateRequest, Sampling

CONFIG = {"r": 4, "lora_alpha": 8.0, "use_rslora": False, "target_modules": [*ALL]}
ASKED = GenerateRequest(
    id="r", token_ids=[5, 6, 7], seed=3, sampling=Sampling(max_tokens=6, ignore_eos=True)
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("channels"))
    yield server
    server.runner.close()


@pytest.fixture(scope="module")
def tensors(server: Server) -> dict[str, Any]:
    path = write_adapter(server.root / "weights" / "a", server.root / "base", 1)
    return load_file(path / "adapter_model.safetensors")


def senders(server: Server) -> dict[str, Any]:
    return {
        "disk": lambda: DiskSender(server, server.root / "weights"),  # type: ignore[arg-type]
        "http": lambda: HttpSender(server),  # type: ignore[arg-type]
        "broadcast": lambda: in_group(server, BroadcastSender, LONG_S),
        "ipc": lambda: IpcSender(server),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("channel", ["disk", "http", "broadcast", "ipc"])
def test_an_adapter_comes_by_any_channel(
    server: Server, tensors: dict[str, Any], channel: str
) -> None:
    engine, with_adapter = server.engine, msgspec.structs.replace(ASKED, lora="math")
    plain, before = engine.run(ASKED), engine.checksums()
    sender = senders(server)[channel]()
    pushed = sender.push(
        tensors, channel, role="adapter", adapter="math", adapter_config={**CONFIG}
    )
    sender.close()
    assert pushed["state"] == "committed"
    assert engine.engine.pushes.state().adapters == {"math": channel}
    found = engine.run(with_adapter)
    assert engine.spans("r")[0][0].endswith(f"+math@{channel}")
    assert found != plain and engine.run(ASKED) == plain
    assert engine.checksums() == before, "the target is what it was"
    engine.push(Path("a"), "again", role="adapter", adapter="math")
    assert engine.run(with_adapter) == found
