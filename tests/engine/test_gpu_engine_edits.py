"""Penalties, biases and min_tokens on the interpreter: planned ahead and speculated on as any other
request, with the tokens of the CPU engine and the same bits under every strategy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.engine.fast_interpreter import patched_once
from tests.engine.gpu_engine import (
    PAGE,
    assert_agree,
    assert_alternatives_agree,
    assert_reports_agree,
    bits,
    checkpoints,
    choose,
    drafting,
    joined,
    on_cpu,
    request,
)
from tests.engine.pushing import Pushable
from tlt_server.commands import Sleep, WakeUp
from tlt_server.engine.settings import EngineSettings
from tlt_server.records import GenerateRequest, Strategy

STRATEGIES = [Strategy("eagle", 3, 2, 6), Strategy("history", 3, 2, 4)]
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3}

ALLOWED = (5, 6, 9, 11, 17, 40)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSettings]:
    with patched_once():
        yield replace(checkpoints(tmp_path_factory.mktemp("smallest")), max_rows=12)


def asked() -> list[GenerateRequest]:
    """Every kind of edit, greedy and not, among requests without."""
    stops = {"ignore_eos": False, "stop_token_ids": list(range(50))}
    return [
        request(0, 6, max_tokens=10, repetition_penalty=1.3, presence_penalty=0.1),
        request(1, 4, max_tokens=8),
        request(2, 5, max_tokens=10, temperature=0.0, **PENALTIES),
        request(3, 15, max_tokens=8, logprobs=2, raw_logprobs=True, prompt_logprobs=3, **PENALTIES),
        request(4, 3, max_tokens=9, min_tokens=5, logit_bias={7: 2.5, 61: -80.0}, **stops),
        request(5, 4, max_tokens=6, top_k=9, frequency_penalty=-0.6, logit_bias={11: 1.0}),
        request(6, 5, max_tokens=8, allowed_token_ids=ALLOWED, bad_words=((5,), (9,))),
        request(7, 4, max_tokens=8, allowed_token_ids=ALLOWED, **PENALTIES),
    ]


IDS = [r.id for r in asked()]


@pytest.fixture(scope="module")
def twin(settings: EngineSettings) -> Pushable:
    cpu = Pushable(on_cpu(settings))
    cpu.run(*asked())
    return cpu


@pytest.fixture(scope="module")
def engine(settings: EngineSettings) -> Pushable:
    return Pushable(drafting(settings, "eagle", 3, 2, 6))


@pytest.fixture(scope="module")
def plain(engine: Pushable) -> dict[str, tuple[object, ...]]:
    choose(engine, None)
    engine.run(*asked())
    return bits(engine, IDS)


def test_no_stop_id_comes_before_min_tokens(twin: Pushable) -> None:
    *_, last = tokens = twin.tokens("r4")
    assert twin.said["r4"][-1].finish_reason == "stop" and last < 50
    assert len(tokens) > 5 and min(tokens[:-1]) >= 50


def test_penalties_change_the_tokens_that_are_sampled(twin: Pushable) -> None:
    plain = twin.run(request(9, 6, max_tokens=10), request(8, 5, max_tokens=10, temperature=0.0))
    assert len(set(twin.tokens("r2"))) > len(set(plain["r8"][0]))


def test_only_allowed_tokens_come_and_none_that_is_banned(twin: Pushable) -> None:
    assert {*twin.tokens("r6")} <= {*ALLOWED} - {5, 9} and {*twin.tokens("r7")} <= {*ALLOWED}


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["tree", "history"])
@pytest.mark.long
def test_speculation_changes_no_bit_of_edited_requests(
    strategy: Strategy, engine: Pushable, plain: dict[str, tuple[object, ...]], twin: Pushable
) -> None:
    choose(engine, strategy)
    engine.run(*asked())
    assert bits(engine, IDS) == plain
    assert_agree(engine, twin, IDS)
    assert_reports_agree(engine, twin, "r3")
    assert_alternatives_agree(
        joined(engine.said["r3"], "prompt_logprobs"), joined(twin.said["r3"], "prompt_logprobs")
    )
    said = [output for id in IDS if id != "r1" for output in engine.said[id]]
    assert sum(output.drafted for output in said) > 0
    assert sum(output.accepted for output in said) > 0 or strategy.drafter == "history"
    assert engine.engine.gauges()["pages_free"] == engine.info.pages


def test_the_host_stays_ahead_of_an_edited_request(engine: Pushable) -> None:
    choose(engine, None)
    engine.submit(asked()[2])
    engine.step(3)
    assert engine.engine.runner.in_flight == 1
    before = len(engine.tokens("r2"))
    engine.step()
    assert len(engine.tokens("r2")) == before + 1 and engine.engine.runner.in_flight == 1
    engine.finish()


@pytest.mark.long
def test_preemption_changes_no_count(settings: EngineSettings) -> None:
    """Two sequences of three pages each, on four."""
    both = [request(i, PAGE - 1 - i, max_tokens=PAGE + 3, **PENALTIES) for i in range(2)]
    cpu = Pushable(on_cpu(settings))
    scarce = Pushable(replace(drafting(settings, "eagle", 3, 1, 4), pages=4))
    cpu.run(*both)
    scarce.run(*both)
    assert scarce.engine.gauges()["preemptions"] > 0
    assert_agree(scarce, cpu, ["r0", "r1"])


def test_counts_that_a_sleep_gave_back_are_made_again(
    settings: EngineSettings, twin: Pushable
) -> None:
    slept = Pushable(drafting(settings, "eagle", 3, 1, 4))
    few = asked()[2:3]
    slept.submit(*few)
    slept.step(5)
    slept.engine.send(Sleep("s", ["kv_cache"]))
    slept.step(2)
    assert slept.engine.idle and slept.engine.halt.take_reports()
    batch_slots = slept.engine.runner.state.batch_slots
    assert batch_slots.count_QV.any() and not batch_slots.uncounted_Q.any()
    batch_slots.count_QV.fill_(5)  # memory comes back with any content
    slept.engine.send(WakeUp("w", ["kv_cache"]))
    slept.finish()
    assert_agree(slept, twin, [request.id for request in few])


def test_only_steps_with_an_edited_request_are_edited(engine: Pushable) -> None:
    choose(engine, None)
    keys = set(engine.engine.runner.passes.extends)
    engine.engine.runner.passes.extends.clear()
    engine.run(asked()[1])
    assert not any(key.edited for key in engine.engine.runner.passes.extends)
    engine.run(asked()[4])
    edited = [key.edited for key in engine.engine.runner.passes.extends if not key.prompt_rows]
    assert edited == [False, True] and any(key.edited for key in keys)
