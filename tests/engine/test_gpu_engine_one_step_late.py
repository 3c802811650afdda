"""Decisions of the host while a step is in flight, and requests whose logits are edited or whose
prompts are scored; on the interpreter, against the CPU engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from tests.engine.fast_interpreter import patched_once
from tests.engine.gpu_engine import (
    assert_agree,
    assert_alternatives_agree,
    assert_reports_agree,
    bits,
    checkpoints,
    drafting,
    joined,
    on_cpu,
    request,
)
from tests.engine.pushing import Pushable
from tests.engine.slow_rows import slow_rows
from tlt_server.commands import Abort
from tlt_server.engine.gpu import reports
from tlt_server.engine.gpu.extend import Extend
from tlt_server.engine.settings import EngineSettings


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSettings]:
    with patched_once():
        yield checkpoints(tmp_path_factory.mktemp("smallest"))


def test_aborted_request_frees_its_slot_and_pages_in_flight(settings: EngineSettings) -> None:
    narrow = replace(drafting(settings, "eagle", 2, 1, 3), max_running=1, pages=2)
    first, second = request(0, 12, max_tokens=20), request(1, 7, max_tokens=3)
    engine, cpu = Pushable(narrow), Pushable(on_cpu(narrow))
    engine.submit(first, second)
    engine.step(4)
    assert engine.engine.runner.in_flight == 1
    engine.engine.send(Abort(["r0"], finish_reason="stop"))  # as for a stop string
    engine.finish()
    cpu.run(first, second)
    assert engine.said["r0"][-1].finish_reason == "stop"
    got = engine.tokens("r0")
    assert 0 < len(got) < 20 and got == cpu.tokens("r0")[: len(got)], (
        "what was said before the abort stays said, nothing after it"
    )
    assert_agree(engine, cpu, ["r1"])
    assert engine.engine.gauges()["pages_free"] == 2


@pytest.mark.long
def test_sequences_left_out_of_steps_go_on_where_they_were(settings: EngineSettings) -> None:
    tree = drafting(settings, "eagle", 2, 2, 4)
    owned = [
        msgspec.structs.replace(request(i, 5 + i, max_tokens=9), owner=owner)
        for i, owner in enumerate(["many", "few", "many"])
    ]
    shared, unshared = Pushable(tree), Pushable(tree)
    left_out = slow_rows(shared.engine.scheduler)
    for engine in (shared, unshared):
        engine.submit(*owned)
        engine.finish()
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
    last = engine.said["r0"][-1]
    assert (
        last.finish_reason == "error"
        and last.error is not None
        and last.error[0] == "not_finite"
        and "finite" in last.error[1]
    )
    norm_H.copy_(kept_H)
    assert len(engine.run(request(1, 3, max_tokens=2))["r1"][0]) == 2, (
        "its batch slot serves the next"
    )


def edited() -> list:
    """Requests with edits of logits and with prompt log-probs, among ordinary ones."""
    return [
        request(0, 6, max_tokens=7),
        request(
            1,
            4,
            temperature=0.7,
            repetition_penalty=1.3,
            presence_penalty=0.4,
            frequency_penalty=0.2,
        ),
        request(2, 5, max_tokens=5, logprobs=3, raw_logprobs=True, top_k=9, frequency_penalty=0.3),
        request(3, 9, max_tokens=4, prompt_logprobs=2),
        request(
            4,
            4,
            max_tokens=5,
            ignore_eos=False,
            stop_token_ids=list(range(56)),
            min_tokens=3,
            logit_bias={40: 1.5, 3: -60.0},
        ),
        request(5, 8, max_tokens=0, prompt_logprobs=1),
        request(6, 1, max_tokens=7, prompt_logprobs=0, temperature=0.0, repetition_penalty=1.5),
    ]


@pytest.fixture(scope="module")
def twin(settings: EngineSettings) -> Pushable:
    cpu = Pushable(on_cpu(settings))
    cpu.run(*edited())
    return cpu


@pytest.fixture(scope="module")
def engine(settings: EngineSettings) -> Pushable:
    engine = Pushable(replace(drafting(settings, "eagle", 2, 1, 3), max_rows=10))
    engine.run(*edited())
    return engine


def test_edited_requests_agree_among_ordinary_ones(engine: Pushable, twin: Pushable) -> None:
    assert_agree(engine, twin, [f"r{i}" for i in range(7)])
    assert engine.said["r4"][-1].finish_reason == "stop" and len(engine.tokens("r4")) >= 3


def test_alternatives_and_raw_logprobs_of_an_edited_distribution_agree(
    engine: Pushable, twin: Pushable
) -> None:
    assert_reports_agree(engine, twin, "r2")


@pytest.mark.parametrize(
    "id", ["r3", "r5", "r6"], ids=["read in pieces", "scored only", "one token"]
)
def test_prompt_logprobs_agree(id: str, engine: Pushable, twin: Pushable) -> None:
    assert_alternatives_agree(
        joined(engine.said[id], "prompt_logprobs"), joined(twin.said[id], "prompt_logprobs")
    )


def test_a_long_prompt_is_scored_in_pieces(
    settings: EngineSettings, twin: Pushable, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = []
    sound = Extend.score_prompt
    monkeypatch.setattr(reports, "SCORED", 5)
    monkeypatch.setattr(
        Extend,
        "score_prompt",
        lambda extend, first, count, best: (
            pieces.append((first, count)) or sound(extend, first, count, best)
        ),
    )
    engine = Pushable(settings)
    engine.run(edited()[3])
    assert pieces == [(0, 5), (5, 3)], "of nine rows eight are scored"
    assert_agree(engine, twin, ["r3"])
    assert_alternatives_agree(
        joined(engine.said["r3"], "prompt_logprobs"), joined(twin.said["r3"], "prompt_logprobs")
    )


def test_an_ordinary_request_has_the_bits_it_has_alone(
    engine: Pushable, settings: EngineSettings
) -> None:
    alone = Pushable(settings)
    alone.run(edited()[0])
    assert bits(alone, ["r0"]) == bits(engine, ["r0"])
