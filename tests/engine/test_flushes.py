"""Cached prefixes that are forgotten while sequences run, wait or are paused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.halting import bits, done, engine, expected, send, started
from tests.engine.pushing import Pushable
from tests.engine.weight_cases import request, root, settings
from tlt_server.engine.settings import EngineSettings
from tlt_server.wire.commands import ClearCache, Pause, Resume

__all__ = ["engine", "expected", "root", "settings"]  # fixtures


def test_cached_prefixes_are_forgotten_on_demand(engine: Pushable) -> None:
    engine.run(request(0))
    assert engine.engine.scheduler.pool.cached > 0
    started(engine)
    refused = send(engine, ClearCache("c", unless_held=True))
    assert refused is not None and refused.error is not None and refused.error[0] == "conflict"
    engine.finish()
    done(engine, ClearCache("c", unless_held=True))
    assert engine.engine.scheduler.pool.cached == 0


def test_the_text_of_earlier_requests_is_forgotten_with_them(settings: EngineSettings) -> None:
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
def test_a_pause_that_leaves_no_kv_can_be_flushed_in(
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


def test_flush_keeps_saved_states_of_mixed_version_sequence(
    settings: EngineSettings, root: Path
) -> None:
    def run(*, flush: bool) -> dict[str, tuple[list[int], list[float]]]:
        engine = Pushable(settings)
        engine.push(root / "new", "v1", commit=False)
        started(engine, 6)
        engine.commit("v1")
        engine.step(2)
        if flush:
            assert not flushed(engine), "they run"
            done(engine, Pause("p", "recompute"))
            assert engine.engine.scheduler.gauges()["spanning"] == 3 and flushed(engine)
            done(engine, Resume("r"))
        engine.finish()
        return bits(engine)

    assert run(flush=True) == run(flush=False)


def test_running_sequence_survives_flush_but_is_not_shared(
    engine: Pushable, expected: object
) -> None:
    started(engine)
    done(engine, ClearCache("c"))
    engine.finish()
    assert bits(engine) == expected and engine.engine.scheduler.pool.cached == 0
    engine.run(request(0))
    assert engine.said["r0"][0].cached_tokens == 0 and engine.engine.scheduler.pool.cached > 0
