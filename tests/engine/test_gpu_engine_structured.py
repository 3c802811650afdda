"""Structured outputs on the interpreter: planned ahead and speculated on as any other request, with
the tokens of the CPU engine and the same bits under every strategy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
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
    on_cpu,
    request,
)
from tests.engine.pushing import Pushable
from tests.engine.tiny import SMALLEST, write_alphabet
from tlt_server.engine.settings import EngineSettings
from tlt_server.grammars.compiler import Compiler
from tlt_server.records import GenerateRequest, Grammar, Strategy

TREE = Strategy("eagle", 3, 2, 6)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GRAMMARS = [
    Grammar(kind="regex", text="(ab|cd){2,4}[0-9]*"),
    Grammar(kind="lark", text='start: /[a-e]+/ ("," /[0-9]{1,2}/)*'),
    Grammar(kind="json_schema", text=json.dumps(SCHEMA | {"additionalProperties": False})),
]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSettings]:
    with patched_once():
        made = checkpoints(tmp_path_factory.mktemp("smallest"))
        write_alphabet(Path(made.model), SMALLEST)
        yield replace(made, max_rows=12)


def structured(i: int, grammar: Grammar, length: int = 5, **sampling: Any) -> GenerateRequest:
    made = request(i, length, **{"max_tokens": 4, "ignore_eos": False, **sampling})
    sampled = msgspec.structs.replace(made.sampling, structured_outputs=grammar)
    return msgspec.structs.replace(made, sampling=sampled)


def asked() -> list[GenerateRequest]:
    """Structures greedy and not, filtered, edited, reported and short, among requests without."""
    return [
        structured(0, GRAMMARS[0], 6, temperature=0.0),
        request(1, 4, max_tokens=6),
        structured(2, GRAMMARS[0], 4, repetition_penalty=1.3, logit_bias={5: 1.0}),
        structured(3, GRAMMARS[1], 15, logprobs=2, raw_logprobs=True),
        structured(4, GRAMMARS[1], 3, top_k=5),
        structured(5, GRAMMARS[2], 4),
        structured(6, Grammar(kind="regex", text="[abc]"), 5),
        structured(7, Grammar(kind="regex", text="ab~"), 5),  # no token has a tilde
        request(8, 5, max_tokens=8, allowed_token_ids=(5, 6, 9, 11), bad_words=BAD),
    ]


BAD = ((5, 5), (6, 6), (5, 6, 5), (9,))
IDS = [r.id for r in asked() if r.id != "r7"]


@pytest.fixture(scope="module")
def twin(settings: EngineSettings) -> Pushable:
    cpu = Pushable(on_cpu(settings))
    cpu.run(*asked())
    return cpu


@pytest.fixture(scope="module")
def engine(settings: EngineSettings) -> Pushable:
    return Pushable(drafting(settings, "eagle", 3, 2, 6))


@pytest.fixture(scope="module")
def plain(engine: Pushable, twin: Pushable) -> dict[str, tuple[object, ...]]:
    choose(engine, None)
    engine.run(*asked())
    assert_agree(engine, twin, IDS)
    return bits(engine, IDS)


def test_every_output_is_a_text_of_its_grammar(twin: Pushable) -> None:
    info = twin.info
    compiler = Compiler(Path(twin.settings.model), info.vocab_size, info.eos_token_ids)
    for r in asked()[2:7]:
        assert r.sampling.structured_outputs is not None
        matcher = compiler.compile(r.sampling.structured_outputs)
        ids = [token for token in twin.tokens(r.id) if token not in info.eos_token_ids]
        assert matcher.consume_tokens(ids), r.id
        assert matcher.is_accepting() or twin.said[r.id][-1].finish_reason == "length"
    assert twin.said["r6"][-1].finish_reason == "stop" and len(twin.tokens("r6")) == 2


def test_no_output_has_a_bad_word(twin: Pushable) -> None:
    tokens = twin.tokens("r8")
    assert len(tokens) == 8 and {*tokens} <= {5, 6, 11} and len({*tokens}) > 1
    assert not any((*tokens[at : at + len(word)],) == word for word in BAD for at in range(8))


def test_speculation_changes_no_bit(
    engine: Pushable, plain: dict[str, tuple[object, ...]], twin: Pushable
) -> None:
    choose(engine, TREE)
    engine.run(*asked())
    assert bits(engine, IDS) == plain
    error = engine.said["r7"][-1].error
    assert error is not None and error[0] == "structure_failed" and "no token" in error[1]
    assert_reports_agree(engine, twin, "r3")
    said = [output for id in IDS if id != "r1" for output in engine.said[id]]
    assert sum(output.drafted for output in said) > 0
    assert sum(output.accepted for output in said) > 0
    assert engine.engine.gauges()["pages_free"] == engine.info.pages


def test_the_host_stays_ahead_of_a_structured_output(engine: Pushable) -> None:
    choose(engine, None)
    engine.said.pop("r3", None)
    engine.submit(asked()[3])
    while "r3" not in engine.said:
        engine.step()
    assert engine.engine.runner.in_flight == 1
    before = len(engine.tokens("r3"))
    engine.step()
    assert len(engine.tokens("r3")) == before + 1 and engine.engine.runner.in_flight == 1
    engine.finish()


def test_failed_and_ended_sequences_are_not_decodes(engine: Pushable) -> None:
    """The step after an end was launched before the host knew of it."""
    choose(engine, TREE)
    engine.said.clear()
    engine.submit(asked()[7], request(8, 5, max_tokens=9))
    decodes = drafts = 0
    while not engine.engine.idle:
        engine.step()
        if (cycle := engine.engine.last_cycle) is not None:
            decodes += len(cycle.accepted)
            drafts += cycle.drafted
            assert sum(cycle.accepted) <= cycle.drafted
    said = [output for id in ("r7", "r8") for output in engine.said[id] if output.token_ids]
    by_prompts = sum(bool(engine.tokens(id)) for id in ("r7", "r8"))
    assert engine.said["r7"][-1].finish_reason == "error"
    assert (decodes, drafts) == (len(said) - by_prompts, sum(output.drafted for output in said))


@pytest.mark.long
def test_preemption_changes_nothing(settings: EngineSettings) -> None:
    """Two sequences of three pages each, on four."""
    endless = Grammar(kind="regex", text="([a-d][0-9])+")
    both = [structured(i, endless, PAGE - 1 - i, max_tokens=PAGE + 3) for i in range(2)]
    cpu = Pushable(on_cpu(settings))
    scarce = Pushable(replace(drafting(settings, "eagle", 3, 1, 4), pages=4))
    cpu.run(*both)
    scarce.run(*both)
    assert scarce.engine.gauges()["preemptions"] > 0
    assert_agree(scarce, cpu, ["r0", "r1"])


def test_only_steps_with_a_structure_are_two_halves(engine: Pushable) -> None:
    choose(engine, None)
    engine.run(request(1, 4, max_tokens=3))
    keys = [key for key in engine.engine.runner.passes.extends if not key.prompt_rows]
    assert {key.structured for key in keys} >= {False, True}
