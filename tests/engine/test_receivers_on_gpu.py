"""Weights received on a GPU, as only a GPU shows it: memory that is really pinned, waits that are
not for the whole device, granted memory.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from tests.engine.pushing import Pushable, perturbed
from tlt_client.channels import cuda
from tlt_client.channels.memory import GRANT, Grant, opened
from tlt_server.attention.backing import Backing
from tlt_server.attention.pinned import block_at, pinned
from tlt_server.demo.workload import TARGET
from tlt_server.engine.gpu.memory.graphs import GraphPool
from tlt_server.engine.gpu.start.maker import GpuMaker
from tlt_server.engine.settings import EngineSettings
from tlt_server.wire.commands import Sleep, WakeUp
from tlt_server.wire.events import ControlReport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LONG = 2_000_000_000  # cycles: a second or so
PAGES = 64 * 2**20  # bytes
SHARES = """
import sys, torch
from tlt_client.channels.memory import share

memory = share(1, torch.device("cuda", 0))
sys.stdout.buffer.write(memory.grant.packed())
sys.stdout.flush()
sys.stdin.read()
memory.close()
"""


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_pinned_memory_is_released_and_shared_by_host_and_gpu() -> None:
    tensor = pinned((PAGES // 4,), torch.int32)
    values = torch.arange(PAGES // 4, dtype=torch.int32, device="cuda")
    assert tensor.is_pinned()
    tensor.copy_(values)
    assert torch.equal(tensor, values.cpu())
    behind, before = Backing(tensor), resident()
    behind.free()
    assert not tensor.is_pinned()
    assert before - resident() > PAGES // 2
    assert int(tensor[::4096].sum()) == 0
    behind.reclaim()
    assert tensor.is_pinned()
    tensor.copy_(values, non_blocking=True)  # by the GPU
    torch.cuda.synchronize()
    assert torch.equal(tensor, values.cpu()), "host and GPU see the same pages"
    tensor.mul_(3)  # by the host
    assert torch.equal(tensor.to("cuda"), values * 3)


def test_pinned_memory_is_unpinned_with_its_tensor() -> None:
    tensor = pinned((PAGES // 4,), torch.int32)
    address = tensor.data_ptr()
    del tensor
    for _ in range(1000):
        if block_at(address) is None:
            break
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="cudaHostUnregister"):
        cuda.unpin(address)
    torch.ones(1, device="cuda").sum().item()  # the error is not the next call's


@pytest.fixture
def busy() -> Iterator[torch.cuda.Event]:
    """Yield an event of a stream that computes for a second, as a broadcast that waits for its
    trainer does for longer.
    """
    stream = torch.cuda.Stream()
    torch.zeros(4, device="cuda").add_(1).sum().item()  # to load a kernel may wait for the device
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1)
        stream.synchronize()
        torch.cuda._sleep(LONG)
        event = stream.record_event()
    yield event
    torch.cuda.synchronize()


def test_commit_waits_for_its_own_streams_only(busy: torch.cuda.Event) -> None:
    device, stream = torch.device("cuda", torch.cuda.current_device()), torch.cuda.Stream()
    staged = torch.zeros(4, device="cuda").add_(1)
    with torch.cuda.stream(stream):
        exchanged = torch.zeros(4, device="cuda").add_(1)
    GpuMaker.synchronize(cast(GpuMaker, SimpleNamespace(device=device, stream=stream)))
    assert not busy.query() and torch.cuda.default_stream().query() and stream.query()
    assert staged.tolist() == exchanged.tolist() == [1.0] * 4


def test_new_graph_key_runs_at_once_while_a_trainer_uses_the_gpu(busy: torch.cuda.Event) -> None:
    stream, x = torch.cuda.Stream(), torch.zeros(4, device="cuda")
    pool = GraphPool(stream, quiet=busy.query)
    stream.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(stream):
        pool.run("key", lambda: x.add_(1), keep=True)
    stream.synchronize()
    assert not busy.query() and "key" not in pool and x.tolist() == [1.0] * 4
    busy.synchronize()
    with torch.cuda.stream(stream):
        pool.run("key", lambda: x.add_(1), keep=True)
    assert "key" in pool


@pytest.mark.parametrize("more, fits", [(0, True), (1, False), (2**40, False)])
def test_driver_reports_the_size_of_another_processs_memory(more: int, fits: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SHARES], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as trainer:
        assert trainer.stdout is not None and trainer.stdin is not None
        grant = Grant.parsed(trainer.stdout.read(GRANT.size))
        asked = grant._replace(size=grant.size + more)
        if fits:
            memory = opened(asked, [])
            assert len(memory.view) == grant.size
            memory.close()
        else:
            with pytest.raises(Exception, match="grant no more than is allocated"):
                opened(asked, [])
            opened(grant, []).close()  # what was refused was closed, too
        trainer.stdin.close()
    assert trainer.returncode == 0


def test_weights_staged_in_pinned_memory_can_sleep(tmp_path: Path) -> None:
    perturbed(TARGET, tmp_path / "new", 1, scale=0.003)
    engine = Pushable(
        EngineSettings(
            model=str(TARGET),
            drafter="none",
            policy="off",
            device="cuda",
            dtype="bfloat16",
            attention="triton",
            kv_memory_mb=256,
            max_model_len=256,
            max_running=8,
            max_rows=128,
            weight_root=str(tmp_path),
            weight_staging="host",
        )
    )
    old = engine.checksums()
    assert engine.push("new", "v").result == "committed"
    new = engine.checksums()
    storage = engine.engine.pushes.transaction.versions.previous.target.network.storage()
    assert new != old and all(tensor.is_pinned() for tensor in storage)
    for _ in range(2):
        for command in (Sleep("s", ["weights", "kv_cache"]), WakeUp("w", ["weights", "kv_cache"])):
            engine.engine.send(command)
            engine.step(2)
            assert engine.engine.control_reports() == [ControlReport(command.id)]
            assert any(tensor.is_pinned() for tensor in storage) == isinstance(command, WakeUp)
        assert engine.checksums() == new
    assert engine.roll_back().result == "rolled_back" and engine.checksums() == old
    assert engine.push("new", "v").result == "committed" and engine.checksums() == new
