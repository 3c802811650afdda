"""Raw log-probs and alternatives on the interpreter: the CPU engine's values, and no bit of what is
sampled depends on asking.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.engine.fast_interpreter import patched_once
from tests.engine.gpu_engine import (
    PAGE,
    assert_agree,
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
from tlt_server.engine.gpu.extend import Extend
from tlt_server.engine.gpu.reports import best_of
from tlt_server.engine.settings import EngineSettings
from tlt_server.records import GenerateRequest, Strategy

TREE = Strategy("eagle", 2, 2, 4)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSettings]:
    with patched_once():
        yield replace(checkpoints(tmp_path_factory.mktemp("smallest")), max_rows=12)


def asked(*, reports: bool) -> list[GenerateRequest]:
    """Three at a time: all kinds of sampling, one that asks for nothing, one with a penalty."""

    def one(
        i: int, length: int, logprobs: int = 0, raw_logprobs: bool = False, **sampling: object
    ) -> GenerateRequest:
        said = {"logprobs": logprobs, "raw_logprobs": raw_logprobs} if reports else {}
        return request(i, length, **{"max_tokens": 4, **said, **sampling})

    return [
        one(0, 3, logprobs=2, raw_logprobs=True),
        one(1, 5),
        one(2, 4, logprobs=5, temperature=0.0),
        one(
            3, 15, logprobs=20, temperature=0.8, top_k=12, top_p=0.9, max_tokens=4
        ),  # fewer are kept than asked for
        one(
            4,
            4,
            raw_logprobs=True,
            temperature=0.6,
            ignore_eos=False,
            stop_token_ids=list(range(0, 60, 3)),
        ),
        one(5, 4, logprobs=1, repetition_penalty=1.3, max_tokens=2),
        one(6, 5, logprobs=64, temperature=1.4, max_tokens=2),
    ]


IDS = [r.id for r in asked(reports=True)]


@pytest.fixture(scope="module")
def twin(settings: EngineSettings) -> Pushable:
    cpu = Pushable(on_cpu(settings))
    cpu.run(*asked(reports=True))
    return cpu


@pytest.fixture(scope="module")
def engine(settings: EngineSettings) -> Pushable:
    return Pushable(drafting(settings, "eagle", 3, 2, 4))


@pytest.fixture(scope="module")
def silent(engine: Pushable) -> dict[str, tuple[object, ...]]:
    choose(engine, None)
    engine.run(*asked(reports=False))
    assert not any(
        output.raw_logprobs or output.top_logprobs for id in IDS for output in engine.said[id]
    )
    return bits(engine, IDS)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(None, id="off", marks=pytest.mark.long),
        pytest.param(TREE, id="tree"),
        pytest.param(Strategy("history", 3, 2, 4), id="history", marks=pytest.mark.long),
    ],
)
def test_asking_changes_no_bit_and_the_values_are_the_cpu_engines(
    strategy: Strategy | None,
    engine: Pushable,
    silent: dict[str, tuple[object, ...]],
    twin: Pushable,
) -> None:
    choose(engine, strategy)
    engine.run(*asked(reports=True))
    assert bits(engine, IDS) == silent
    assert_agree(engine, twin, IDS)
    for id in IDS:
        assert_reports_agree(engine, twin, id)
    for given in asked(reports=True):
        tokens, sampling = len(engine.tokens(given.id)), given.sampling
        assert len(joined(engine.said[given.id], "raw_logprobs")) == tokens * sampling.raw_logprobs
        assert len(joined(engine.said[given.id], "top_logprobs")) == tokens * (
            sampling.logprobs > 0
        )
    if strategy is not None and strategy.drafter == "eagle":
        assert (
            sum(output.accepted for id in ("r0", "r2", "r3", "r6") for output in engine.said[id])
            > 0
        )
    assert {len(top.token_ids) for top in joined(engine.said["r6"], "top_logprobs")} == {64}, (
        "the whole vocabulary"
    )
    assert max(len(top.token_ids) for top in joined(engine.said["r3"], "top_logprobs")) <= 12
    assert engine.engine.gauges()["pages_free"] == engine.info.pages


def test_the_host_stays_ahead_of_a_request_that_asks(engine: Pushable) -> None:
    choose(engine, None)
    engine.submit(asked(reports=True)[0])
    engine.step(3)
    assert engine.engine.runner.in_flight == 1
    before = len(engine.tokens("r0"))
    engine.step()
    assert len(engine.tokens("r0")) == before + 1 and engine.engine.runner.in_flight == 1, (
        "one step a token, taken in a step late"
    )
    engine.finish()


@pytest.mark.long
def test_preemption_changes_neither_tokens_nor_their_reports(settings: EngineSettings) -> None:
    """Two sequences of three pages each, on four."""
    both = [
        request(i, PAGE - 1 - i, max_tokens=PAGE + 3, logprobs=2, raw_logprobs=True)
        for i in range(2)
    ]
    cpu, scarce = (
        Pushable(on_cpu(settings)),
        Pushable(replace(drafting(settings, "eagle", 3, 1, 4), pages=4)),
    )
    cpu.run(*both)
    scarce.run(*both)
    assert scarce.engine.gauges()["preemptions"] > 0
    assert_agree(scarce, cpu, ["r0", "r1"])
    for id in ("r0", "r1"):
        assert_reports_agree(scarce, cpu, id)


def test_a_step_in_which_nobody_asks_reads_no_logits_again(
    engine: Pushable, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    sound = Extend.report
    monkeypatch.setattr(
        Extend, "report", lambda *given, raw: calls.append(given) or sound(*given, raw=raw)
    )
    choose(engine, None)
    engine.run(asked(reports=False)[0], asked(reports=False)[5])
    assert not calls
    engine.run(asked(reports=True)[0])
    assert calls


def test_few_different_numbers_of_alternatives_are_computed() -> None:
    assert [best_of(count) for count in (0, 1, 16, 17, 20, 1024)] == [0, 16, 16, 32, 32, 1024]
