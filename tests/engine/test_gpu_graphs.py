"""The pool of captured graphs: what is recorded, in which order, what it takes, and that a replay
does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from tlt_server.engine.gpu.memory.graphs import DRIVER_BYTES, GraphPool

GIB = 2**30


def test_work_without_a_stream_runs_and_records_no_graph() -> None:
    pool, runs = GraphPool(None), []
    for _ in range(3):
        pool.run("key", lambda: runs.append(1), keep=True)
    assert len(runs) == 3 and "key" not in pool and pool.total_bytes == 0


def test_no_graph_is_recorded_while_a_trainer_holds_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Recording begins with a wait for the whole device."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    quiet, runs, recorded = [False, True], [], []
    pool = GraphPool(object(), quiet=lambda: quiet.pop(0))  # type: ignore[arg-type]
    monkeypatch.setattr(pool, "_record", lambda key, work, started: recorded.append(key))
    for count in (0, 1):
        pool.run("key", lambda: runs.append(1), keep=True)
        assert len(recorded) == count and len(runs) == count + 1


class Recorder:
    """A stand-in for torch's recording of graphs on a device with `free` bytes. Torch reserves
    `each` for a graph, the driver takes `driver`, and others take `others` meanwhile.
    """

    def __init__(self, free: int, each: int, driver: int = 0, others: int = 0) -> None:
        self.free, self.each, self.recording = free, each, False
        self.error: type[RuntimeError] = torch.OutOfMemoryError
        self.reserved, self._beside = 0, driver + others

    @contextmanager
    def graph(self, *_: object, **__: object) -> Iterator[None]:
        self.recording = True
        try:
            yield
            self.free -= self.each + self._beside
            self.reserved += self.each
        finally:
            self.recording = False

    def work(self) -> None:
        if self.recording and self.each > self.free:
            raise self.error(
                "CUDA out of memory. Tried to allocate 3.00 GiB. "
                "GPU 0 has a total capacity of 8.00 GiB"
            )

    def replay(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recorder]:
    def made(free: int, each: int, **beside: int) -> Recorder:
        recorder = Recorder(free, each, **beside)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: recorder.reserved)
        monkeypatch.setattr(torch.cuda, "graph", recorder.graph)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: recorder)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (recorder.free, 8 * GIB))
        return recorder

    return made


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_graph_without_room_is_reported_once_and_retried(
    recorder: Callable[..., Recorder], capsys: pytest.CaptureFixture[str], error: type[RuntimeError]
) -> None:
    """A driver's error is torch's or a plain one."""
    device = recorder(free=GIB, each=3 * GIB)
    device.error = error
    pool = GraphPool(device, most_bytes=100 * GIB)  # type: ignore[arg-type]
    for key in ("wide", "narrow", "wide"):
        pool.run(key, device.work, keep=True)
    assert not pool.bytes and not pool.seconds
    message = capsys.readouterr().err
    assert message.count("\n") == 1, "once"
    assert (
        "the graph of wide: 3.00 GiB more were asked for and 1024 MiB of its 8192 MiB are free"
        in message
    )
    assert "launched kernel by kernel" in message and "lower --memory-fraction" in message
    device.free = 4 * GIB
    pool.run("wide", device.work, keep=True)
    assert "wide" not in pool, "nothing is tried again while graphs hold what is left"
    pool.clear()
    pool.run("wide", device.work, keep=True)
    assert "wide" in pool and list(pool.seconds) == ["wide"] and not capsys.readouterr().err


def test_exhausted_graph_memory_is_reported_once(
    recorder: Callable[..., Recorder], capsys: pytest.CaptureFixture[str]
) -> None:
    device = recorder(free=8 * GIB, each=GIB)
    pool = GraphPool(device, most_bytes=2 * GIB)  # type: ignore[arg-type]
    for key in range(4):
        pool.run(key, device.work, keep=True)
    message = capsys.readouterr().err
    assert list(pool.bytes) == [0, 1] and message.count("\n") == 1
    assert "2 graphs take 2048 MiB, 2048 MiB are set aside" in message
    assert "lower --max-running" in message


def test_graph_size_excludes_memory_taken_by_other_programs(
    recorder: Callable[..., Recorder],
) -> None:
    device = recorder(free=8 * GIB, each=16 << 20, driver=1 << 20, others=GIB)
    pool = GraphPool(device)  # type: ignore[arg-type]
    pool.record("key", device.work)
    assert pool.bytes == {"key": (16 << 20) + DRIVER_BYTES}, "at most what a driver takes"
    alone = recorder(free=8 * GIB, each=16 << 20, driver=1 << 20)
    pool.record("other", alone.work)
    assert pool.bytes["other"] == 17 << 20


def test_recording_ahead_runs_no_work_and_drops_failures(recorder: Callable[..., Recorder]) -> None:
    device, recording = recorder(free=8 * GIB, each=0), []
    pool = GraphPool(device)  # type: ignore[arg-type]
    for _ in range(2):
        pool.record("key", lambda: recording.append(device.recording))
    assert recording == [True] and "key" in pool

    def fails() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        pool.record("another", fails)
    assert "another" not in pool and not device.recording


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu:
    def test_key_is_recorded_after_its_first_run_then_replayed(self) -> None:
        stream = torch.cuda.Stream()
        calls: list[int] = []

        def work() -> None:
            calls.append(1)
            x.add_(1)

        with torch.cuda.stream(stream):
            pool, x = GraphPool(stream), torch.zeros(4, device="cuda")
            for _ in range(5):
                pool.run("key", work, keep=True)
        stream.synchronize()
        assert len(calls) == 2, "once to run, once to record"
        assert x.tolist() == [5.0] * 4, "recording executes nothing"
        assert "key" in pool and pool.seconds["key"] > 0

    def test_graph_recorded_ahead_first_runs_at_its_replay(self) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            pool, x = GraphPool(stream), torch.zeros(4, device="cuda")
            x.add_(1)  # torch has its kernel
            pool.record("key", lambda: x.add_(1))
            pool.run("key", lambda: None, keep=True)
        stream.synchronize()
        assert x.tolist() == [2.0] * 4 and pool.seconds["key"] > 0

    def test_work_that_is_not_kept_runs_each_time(self) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            pool, x = GraphPool(stream), torch.zeros(1, device="cuda")
            for _ in range(3):
                pool.run("key", lambda: x.add_(1), keep=False)
        stream.synchronize()
        assert x.item() == 3 and "key" not in pool and not pool.bytes

    def test_graphs_share_the_memory_of_the_largest_graph(self) -> None:
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

    def test_graph_without_room_is_reported_and_the_stream_continues(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        stream = torch.cuda.Stream()
        pool, x = GraphPool(stream), torch.zeros(1, device="cuda")

        def work() -> None:
            x.add_(1)
            if torch.cuda.is_current_stream_capturing() and greedy:
                torch.empty(1 << 45, dtype=torch.uint8, device="cuda")

        with torch.cuda.stream(stream):
            greedy = True
            for _ in range(3):
                pool.run("key", work, keep=True)
            message = capsys.readouterr().err
            assert "key" not in pool
            assert message.count("\n") == 1
            assert "32768.00 GiB more were asked for" in message
            pool.clear()
            greedy = False
            for _ in range(3):
                pool.run("key", work, keep=True)
        stream.synchronize()
        assert x.item() == 6 and "key" in pool
