"""The pool of captured graphs: what is recorded, in which order, what it takes, and that a replay does the work."""

from __future__ import annotations

import pytest
import torch

from tlt_server.engine.gpu.graphs import GraphPool


def test_without_a_stream_work_runs_each_time_and_nothing_is_recorded() -> None:
    pool, runs = GraphPool(None), []
    for _ in range(3):
        pool.run("key", lambda: runs.append(1), keep=True)
    assert len(runs) == 3 and "key" not in pool and pool.total_bytes == 0


def test_nothing_is_recorded_while_a_trainer_holds_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording begins with a wait for the whole device."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    quiet, runs, recorded = [False, True], [], []
    pool = GraphPool(object(), quiet=lambda: quiet.pop(0))  # type: ignore[arg-type]
    monkeypatch.setattr(pool, "_record", lambda key, work: recorded.append(key))
    for count in (0, 1):
        pool.run("key", lambda: runs.append(1), keep=True)
        assert len(recorded) == count and len(runs) == count + 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu:
    def test_a_key_is_recorded_behind_its_first_run_and_then_replayed(self) -> None:
        stream = torch.cuda.Stream()
        pool, x, calls = GraphPool(stream), torch.zeros(4, device="cuda"), []

        def work() -> None:
            calls.append(1)
            x.add_(1)

        with torch.cuda.stream(stream):
            for _ in range(5):
                pool.run("key", work, keep=True)
        stream.synchronize()
        assert len(calls) == 2, "once to run, once to record"
        assert x.tolist() == [5.0] * 4, "recording executes nothing"
        assert "key" in pool and pool.seconds["key"] > 0

    def test_what_is_not_kept_is_run_each_time(self) -> None:
        stream = torch.cuda.Stream()
        pool, x = GraphPool(stream), torch.zeros(1, device="cuda")
        with torch.cuda.stream(stream):
            for _ in range(3):
                pool.run("key", lambda: x.add_(1), keep=False)
        stream.synchronize()
        assert x.item() == 3 and "key" not in pool and not pool.bytes

    def test_graphs_share_the_memory_of_the_largest(self) -> None:
        stream = torch.cuda.Stream()
        pool, found = GraphPool(stream), {}

        def work(size: int) -> None:
            found[size] = torch.ones(size, 2**20, device="cuda").sum()

        with torch.cuda.stream(stream):
            for size in (64, 32, 16):
                pool.run(size, lambda size=size: work(size), keep=True)
            for size in (16, 64, 32):
                pool.run(size, lambda: None, keep=True)
                stream.synchronize()
                assert found[size].item() == size * 2**20
        assert list(pool.bytes) == [64, 32, 16] and pool.total_bytes == sum(pool.bytes.values())
        assert pool.bytes[64] >= 64 * 2**22 and pool.bytes[32] + pool.bytes[16] < 32 * 2**22
