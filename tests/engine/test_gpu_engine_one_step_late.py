"""Decisions of the host while a step is in flight, and what the GPU engine keeps between steps; on
the interpreter.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.engine.fast_interpreter import patched_once
from tests.engine.gpu_engine import (
    assert_agree,
    assert_alternatives_agree,
    bits,
    checkpoints,
    drafting,
    joined,
    on_cpu,
    request,
)
from tests.engine.pushing import Pushable
from tests.engine.slow_rows import slow_rows
from tlt_server.engine.gpu.steps import reports
from tlt_server.engine.gpu.steps.extend import Extend
from tlt_server.engine.settings import EngineSettings
from tlt_server.wire.commands import Abort, Sleep, WakeUp


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSettings]:
    with patched_once():
        yield checkpoints(tmp_path_factory.mktemp("smallest"))


def on_the_cpu(settings: EngineSettings, *requests: Any) -> Pushable:
    cpu = Pushable(on_cpu(settings))
    cpu.run(*requests)
    return cpu


def test_aborted_request_frees_its_slot_and_pages_in_flight(settings: EngineSettings) -> None:
    narrow = replace(drafting(settings, "eagle", 2, 1, 3), max_running=1, pages=2)
    first, second = request(0, 12, max_tokens=20), request(1, 7, max_tokens=3)
    engine, cpu = Pushable(narrow), on_the_cpu(narrow, first, second)
    engine.submit(first, second)
    engine.step(4)
    assert engine.engine.runner.in_flight == 1
    engine.engine.send(Abort(["r0"], finish_reason="stop"))  # as for a stop string
    engine.finish()
    assert engine.said["r0"][-1].finish_reason == "stop"
    got = engine.tokens("r0")
    assert 0 < len(got) < 20
    assert got == cpu.tokens("r0")[: len(got)], "nothing is said after the abort"
    assert_agree(engine, cpu, ["r1"])
    assert engine.engine.gauges()["pages_free"] == 2


@pytest.mark.long
def test_skipped_sequences_continue_where_they_stopped(settings: EngineSettings) -> None:
    tree = drafting(settings, "eagle", 2, 2, 4)
    owned = [
        msgspec.structs.replace(request(i, 5 + i, max_tokens=9), owner=owner)
        for i, owner in enumerate(["many", "few", "many"])
    ]
    shared, unshared = Pushable(tree), Pushable(tree)
    left_out = slow_rows(shared.engine.scheduler)
    for engine in (shared, unshared):
        engine.run(*owned)
    assert {"r0", "r2"} <= set().union(*left_out), "they take turns"
    ids = [each.id for each in owned]
    assert bits(shared, ids) == bits(unshared, ids)


def test_non_finite_weights_end_a_request_with_one_typed_error(settings: EngineSettings) -> None:
    engine = Pushable(settings)
    engine.submit(request(0))
    engine.step(3)
    norm_H = engine.engine.runner.state.model.final_norm_H
    kept_H = norm_H.clone()
    norm_H.fill_(float("nan"))
    engine.finish()
    error = engine.said["r0"][-1].error
    assert error is not None
    assert error[0] == "not_finite"
    assert "finite" in error[1]
    norm_H.copy_(kept_H)
    after = engine.run(request(1, 3, max_tokens=2))["r1"][0]
    assert len(after) == 2, "its batch slot serves the next"


def test_long_prompt_is_scored_in_chunks(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(3, 9, max_tokens=4, prompt_logprobs=2)
    pieces = []
    score = Extend.score_prompt
    monkeypatch.setattr(reports, "SCORED", 5)
    monkeypatch.setattr(
        Extend, "score_prompt", lambda *given: pieces.append(given[1:3]) or score(*given)
    )
    engine, cpu = Pushable(settings), on_the_cpu(settings, asked)
    engine.run(asked)
    assert pieces == [(0, 5), (5, 3)], "of nine rows eight are scored"
    assert_agree(engine, cpu, ["r3"])
    assert_alternatives_agree(*(joined(e.said["r3"], "prompt_logprobs") for e in (engine, cpu)))


def test_penalty_counts_are_recomputed_after_a_sleep(settings: EngineSettings) -> None:
    asked = request(2, 5, 10, temperature=0.0, repetition_penalty=1.4, presence_penalty=0.5)
    slept = Pushable(drafting(settings, "eagle", 3, 1, 4))
    slept.submit(asked)
    slept.step(5)
    slept.engine.send(Sleep("s", ["kv_cache"]))
    slept.step(2)
    assert slept.engine.idle
    assert slept.engine.halt.take_reports()
    batch_slots = slept.engine.runner.state.batch_slots
    assert batch_slots.count_QV.any()
    assert not batch_slots.uncounted_Q.any()
    batch_slots.count_QV.fill_(5)  # memory comes back with any content
    slept.engine.send(WakeUp("w", ["kv_cache"]))
    slept.finish()
    assert_agree(slept, on_the_cpu(settings, asked), ["r2"])


def test_no_activation_outlives_its_step(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Pushable(replace(drafting(settings, "eagle", 3, 2, 4), max_rows=64))
    model, hidden = engine.engine.runner.state.model, []
    forward = model.forward

    def watched(*given: Any) -> Any:
        forwarded = forward(*given)
        hidden.append(weakref.ref(forwarded.hidden_RH))
        return forwarded

    monkeypatch.setattr(model, "forward", watched)
    engine.run(request(0, 9, max_tokens=4))
    gc.collect()
    assert len(hidden) > 2
    assert not any(held() is not None for held in hidden)


def test_uncaptured_passes_are_made_for_their_step_only(settings: EngineSettings) -> None:
    engine = Pushable(replace(settings, max_rows=64))
    for i, length in enumerate((3, 9, 13, 17, 21)):  # a captured step would hold the first
        engine.run(request(i, length, max_tokens=1))
    kept = engine.engine.runner.passes.extends
    assert 0 < len(kept) < 5
    assert all(engine.engine.runner.shapes.keeps(key) for key in kept)


def test_pages_are_reserved_for_the_depth_in_use(settings: EngineSettings) -> None:
    engine = Pushable(drafting(settings, "eagle", 20, 1, 21))
    assert engine.engine.runner.state.depth == engine.engine.scheduler.lookahead == 20
