"""Pause, sleep and flush in a whole engine: running requests end, wait or continue with the same
bits, memory is really given back, and cached prefixes are forgotten.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.halting import bits, done, engine, expected, send, started
from tests.engine.pushing import Pushable, why
from tests.engine.weight_cases import request, root, settings
from tlt_server.engine.settings import EngineSettings
from tlt_server.wire.commands import ClearCache, Pause, Resume, Sleep, WakeUp
from tlt_server.wire.events import ControlReport

__all__ = ["engine", "expected", "root", "settings"]  # fixtures


def resident_mb() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Rss:")).split()[1]) / 1024


@pytest.mark.parametrize("in_flight", ["continue", "recompute"])
def test_paused_requests_resume_with_the_same_bits(
    in_flight: str, engine: Pushable, expected: object
) -> None:
    started(engine)
    done(engine, Pause("p", in_flight))  # type: ignore[arg-type]
    held = engine.engine.scheduler.pool.held
    assert (held == 0) == (in_flight == "recompute")
    before = bits(engine)
    engine.step(5)
    assert engine.engine.idle and bits(engine) == before
    done(engine, Resume("r"))
    engine.finish()
    assert bits(engine) == expected


def test_idle_work_runs_only_without_running_or_paused_requests(engine: Pushable) -> None:
    engine.engine._record = lambda reach: True
    assert not engine.engine.use_idle_time(), "a command waits"
    engine.step()
    assert engine.engine.use_idle_time()
    started(engine)
    assert not engine.engine.use_idle_time()
    done(engine, Pause("p", "continue"))
    engine.step(2)
    assert engine.engine.idle and not engine.engine.use_idle_time()
    done(engine, Resume("r"))
    engine.finish()
    assert engine.engine.use_idle_time()
    done(engine, Sleep("s", ("kv_cache",), "abort"))
    assert not engine.engine.use_idle_time()


def test_aborting_pause_returns_partials_and_later_requests_wait(
    engine: Pushable, expected: dict[str, object]
) -> None:
    started(engine)
    done(engine, Pause("p", "abort"))
    assert all(
        engine.said[f"r{i}"][-1].finish_reason == "abort" and 0 < len(engine.tokens(f"r{i}")) < 40
        for i in range(3)
    )
    engine.said.clear()
    engine.submit(request(1))
    engine.step(3)
    assert "r1" not in engine.said
    done(engine, Resume("r"))
    engine.finish()
    assert (engine.tokens("r1"), engine.logprobs("r1")) == expected["r1"]


@pytest.mark.parametrize(
    ("halt", "end"),
    [
        (Pause("halt", "drain"), Resume("end")),
        (Sleep("halt", ["weights", "kv_cache"], "drain"), WakeUp("end", ["weights", "kv_cache"])),
    ],
    ids=["pause", "sleep"],
)
def test_draining_pause_begins_after_the_last_running_request(
    halt: Pause | Sleep, end: Resume | WakeUp, engine: Pushable, expected: object
) -> None:
    started(engine)
    assert send(engine, halt) is None
    reports: list[ControlReport] = []
    while not reports:
        engine.step()
        reports = engine.engine.control_reports()
    assert reports == [ControlReport("halt")]
    assert engine.engine.gate.by_operator
    assert bits(engine) == expected
    engine.submit(request(1))
    engine.said.clear()
    engine.step(3)
    assert not engine.said, "later requests wait"
    done(engine, end)
    engine.finish()
    started(engine)
    engine.engine.send(halt)
    engine.engine.send(end)
    engine.step()
    told = {report.id: report.error for report in engine.engine.control_reports()}
    assert told["end"] is None
    assert told["halt"] is not None and told["halt"][0] == "conflict", "it ended before it began"
    engine.finish()


@pytest.mark.parametrize("memory", [["kv_cache"], ["weights"], ["weights", "kv_cache"]])
def test_requests_resume_after_a_sleep_with_the_same_bits(
    memory: list[str], engine: Pushable, expected: object
) -> None:
    sums = engine.checksums()
    started(engine)
    assert any(output.drafted for said in engine.said.values() for output in said), (
        "the drafter must be at work"
    )
    done(engine, Sleep("s", memory))  # type: ignore[arg-type]
    assert engine.engine.scheduler.pool.held == 0
    engine.step(3)
    for memory_kind in memory:
        assert engine.engine.gate.by_operator
        done(engine, WakeUp("w", [memory_kind]))  # type: ignore[list-item]
    engine.finish()
    assert bits(engine) == expected and engine.checksums() == sums
    assert sum(output.accepted for said in engine.said.values() for output in said[5:]) > 0, (
        "the drafter is back"
    )


def test_sleep_frees_memory_and_waking_reallocates_memory(
    settings: EngineSettings, root: Path, tmp_path: Path
) -> None:
    shutil.copytree(root / "base", tmp_path / "base")
    engine = Pushable(replace(settings, pages=12_000, model=str(tmp_path / "base")))
    cache = engine.engine.runner._cache  # type: ignore[attr-defined]
    cache.k.fill_(1.0)
    cache.v.fill_(1.0)
    network = engine.engine.pushes.transaction.versions.live.target.network
    full = [
        float(tensor.abs().sum())
        for tensor in network.parameters().values()
        if tensor.numel() >= 3000
    ]
    before, size = resident_mb(), 2 * cache.k.nbytes / 2**20
    assert size > 90
    done(engine, Sleep("s", ["weights", "kv_cache"]))
    assert resident_mb() < before - 0.9 * size
    large = [tensor for tensor in network.parameters().values() if tensor.numel() >= 3000]
    assert sum(float(tensor.abs().sum()) for tensor in large) < 0.9 * sum(full), (
        "whole pages are gone"
    )
    done(engine, WakeUp("w", ["weights", "kv_cache"]))
    assert [float(tensor.abs().sum()) for tensor in large] == full
    assert float(cache.k.abs().sum()) < 0.001 * cache.k.numel(), (
        "but for what shares a page with other data"
    )
    assert engine.run(request(0)) == Pushable(settings).run(request(0))


def test_push_is_refused_for_sleeping_weights_but_not_pages(
    engine: Pushable, settings: EngineSettings, root: Path
) -> None:
    done(engine, Sleep("s", ["weights", "kv_cache"]))
    refused = engine.push(root / "new", "v1")
    assert refused.result == "conflict" and "/engine/wake" in why(refused)
    done(engine, WakeUp("w", ["weights"]))
    assert engine.push(root / "new", "v1").result == "committed"
    done(engine, WakeUp("w", ["kv_cache"]))
    fresh = Pushable(replace(settings, model=str(root / "new")))
    assert engine.run(request(0)) == fresh.run(request(0))
    done(engine, Sleep("s", ["weights", "kv_cache"]))
    done(engine, WakeUp("w", ["weights", "kv_cache"]))
    assert engine.roll_back().result == "rolled_back", "the version before slept and came back, too"
    assert engine.run(request(0)) == Pushable(settings).run(request(0))


def test_draining_change_is_refused_while_requests_are_paused(engine: Pushable, root: Path) -> None:
    found = engine.push(root / "new", "v0").checksums
    sums = [{"name": name, "checksum": value} for name, value in found.items()]
    again = {"in_flight": "drain", "tensors": sums}
    assert engine.push(root / "new", "v1", **again).result == "committed"
    assert engine.push(root / "base", "v2", in_flight="drain", commit=False).result == "staged"
    started(engine)
    done(engine, Pause("p"))
    report = engine.commit("v2")
    assert (report.state.open["state"], report.state.target) == ("staged", "v1")
    assert engine.abort("v2").result == "aborted"
    for refused in (
        report,
        engine.push(root / "base", "v3", in_flight="drain"),
        engine.roll_back(in_flight="drain"),
    ):
        assert refused.result == "conflict"
        for words in ("drain", "POST /engine/resume", "another in_flight"):
            assert words in why(refused)
    unchanged = engine.push(root / "new", "v1", **again)
    assert unchanged.result == "unchanged", why(unchanged)
    assert engine.push(root / "base", "v3").result == "committed", "any other in_flight goes on"
    assert engine.roll_back(in_flight="recompute").result == "rolled_back"
    done(engine, Resume("r"))
    engine.finish()
    done(engine, Pause("q"))
    assert engine.push(root / "base", "v4", in_flight="drain").result == "committed", "nothing runs"


def test_cache_clear_forgets_cached_prefixes(engine: Pushable) -> None:
    engine.run(request(0))
    assert engine.engine.scheduler.pool.cached > 0
    started(engine)
    refused = send(engine, ClearCache("c", unless_held=True))
    assert why(refused).startswith("conflict")
    engine.finish()
    done(engine, ClearCache("c", unless_held=True))
    assert engine.engine.scheduler.pool.cached == 0


def test_cache_clear_forgets_the_text_of_earlier_requests(settings: EngineSettings) -> None:
    engine = Pushable(replace(settings, drafter="history"))
    engine.run(request(0), request(1))
    assert engine.engine.gauges()["history_pool_tokens"] > 0
    done(engine, ClearCache("c", unless_held=True))
    assert engine.engine.gauges()["history_pool_tokens"] == 0


def flushed(engine: Pushable) -> bool:
    report = send(engine, ClearCache("c", unless_held=True))
    assert report is not None and (report.error is None or report.error[0] == "conflict")
    return report.error is None


@pytest.mark.parametrize("in_flight", ["continue", "recompute", "abort"])
def test_flush_succeeds_in_a_pause_without_kv(
    in_flight: str, engine: Pushable, expected: dict[str, object]
) -> None:
    """Waiting sequences, preempted or new, do not prevent the flush."""
    engine.run(request(3))
    started(engine)
    done(engine, Pause("p", in_flight))  # type: ignore[arg-type]
    engine.submit(request(4))
    engine.step()
    pool, waiting = engine.engine.scheduler.pool, engine.engine.scheduler.gauges()["waiting"]
    assert waiting == {"continue": 1, "recompute": 4, "abort": 1}[in_flight]
    cached = pool.cached
    assert flushed(engine) == (in_flight != "continue")
    assert pool.cached == (cached if in_flight == "continue" else 0)
    done(engine, Resume("r"))
    engine.finish()
    assert engine.said["r4"][-1].finish_reason == "length"
    assert in_flight == "abort" or bits(engine) == expected


@pytest.mark.parametrize("memory", [(), ("weights", "kv_cache")], ids=["flush", "sleep"])
def test_kv_of_two_versions_survives_a_flush_or_a_sleep(
    memory: tuple[str, ...], settings: EngineSettings, root: Path
) -> None:
    """Saved states are not computed again."""

    def run(*, halts: bool) -> dict[str, tuple[list[int], list[float]]]:
        engine = Pushable(settings)
        engine.push(root / "new", "v1", commit=False)
        started(engine, 6)
        engine.commit("v1")
        engine.step(2)
        assert all(len(engine.spans(f"r{i}")) == 2 for i in range(3))
        if halts and memory:
            done(engine, Sleep("s", memory))  # type: ignore[arg-type]
            done(engine, WakeUp("w", memory))  # type: ignore[arg-type]
        elif halts:
            assert not flushed(engine), "they run"
            done(engine, Pause("p", "recompute"))
            assert engine.engine.scheduler.gauges()["spanning"] == 3 and flushed(engine)
            done(engine, Resume("r"))
        engine.finish()
        return bits(engine)

    assert run(halts=True) == run(halts=False)


def test_running_sequence_survives_flush_but_is_not_shared(
    engine: Pushable, expected: object
) -> None:
    started(engine)
    done(engine, ClearCache("c"))
    engine.finish()
    assert bits(engine) == expected and engine.engine.scheduler.pool.cached == 0
    engine.run(request(0))
    assert engine.said["r0"][0].cached_tokens == 0 and engine.engine.scheduler.pool.cached > 0
