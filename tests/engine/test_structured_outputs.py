"""Structured outputs on the CPU engine: every output is a text of its grammar, with the same bits
under every strategy, alone and in company, after a preemption and after an engine's end. Tests of
what may depend on the tokenizer run over those of families of models.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer

from tests.engine.families import ALPHABET, CASES, write_family
from tests.engine.gpu_engine import bits as of_tokens
from tests.engine.gpu_engine import joined
from tests.engine.pushing import Pushable, cpu_settings
from tests.engine.schemas import Schemas
from tests.engine.tiny import EOS
from tests.mostly_long import mostly_long
from tests.tokenizers import FAMILIES
from tlt_server.engine import process
from tlt_server.engine.loop import Engine
from tlt_server.engine.sampling.structures import Structures
from tlt_server.engine.settings import EngineSettings
from tlt_server.engine.start import assembly
from tlt_server.grammars.compiler import Compiler
from tlt_server.grammars.forms import grammar_of
from tlt_server.wire.commands import SetPolicy
from tlt_server.wire.records import GenerateRequest, Grammar, Sampling, Strategy

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": -99, "maximum": 99},
        "b": {"enum": ["x", "yy", None]},
        "c": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar(kind="json_schema", text=json.dumps(SCHEMA)),
    Grammar(kind="regex", text="[a-f]{3,9}:[0-9]+"),
    Grammar(kind="lark", text='start: item ("," item)*\nitem: /[a-z]{1,3}/ | "[" start "]"'),
]
# Each letter adds to the work of the next mask, without an end.
GROWING = [
    Grammar(kind="regex", text="((a{1,20}){1,20}){1,20}b"),
    Grammar(kind="lark", text='start: e\ne: e e | e "+" e | "a"'),
]
STRATEGIES = [Strategy("eagle", 3, 1, 4), Strategy("eagle", 4, 3, 12), Strategy("history", 4, 2, 6)]


NAMES = [ALPHABET, *FAMILIES]
once = pytest.mark.parametrize("settings", [ALPHABET], indirect=True)


@pytest.fixture(scope="module", params=CASES)
def settings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> EngineSettings:
    target, drafter = write_family(tmp_path_factory.mktemp("tiny"), request.param)
    return cpu_settings(target, drafter)


@pytest.fixture(scope="module")
def engine(settings: EngineSettings) -> Iterator[Pushable]:
    yield Pushable(settings)


def request(i: int, grammar: Grammar | None, **sampling: Any) -> GenerateRequest:
    given: dict[str, Any] = {"max_tokens": 60, **sampling}
    tokens = np.random.default_rng(i).integers(0, EOS, 6 + i % 5).tolist()
    sampled = Sampling(structured_outputs=grammar, **given)
    return GenerateRequest(id=f"r{i}", token_ids=tokens, seed=70 + i, sampling=sampled)


def asked() -> list[GenerateRequest]:
    """Each grammar greedy, sampled, filtered and with penalties, among requests without one."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.6, "top_k": 9, "min_p": 0.02, "logprobs": 3, "raw_logprobs": True},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "logit_bias": {5: 3.0}},
    ]
    grammars = [*GRAMMARS, None]
    return [
        request(4 * g + k, grammar, **kind)
        for g, grammar in enumerate(grammars)
        for k, kind in enumerate(kinds)
    ]


def spelling(engine: Pushable) -> Tokenizer:
    return Tokenizer.from_file(f"{engine.settings.model}/tokenizer.json")


def end_token(engine: Pushable) -> int:
    return engine.info.eos_token_ids[0]


def text(engine: Pushable, id: str) -> str:
    tokens = [token for token in engine.tokens(id) if token != end_token(engine)]
    return str(spelling(engine).decode(tokens, skip_special_tokens=False))


def bits(engine: Pushable, requests: list[GenerateRequest]) -> dict[str, Any]:
    return {
        r.id: [
            engine.said[r.id][-1].error,
            joined(engine.said[r.id], "top_logprobs"),
            joined(engine.said[r.id], "raw_logprobs"),
            of_tokens(engine, [r.id]),
        ]
        for r in requests
    }


@pytest.fixture(scope="module")
def plain(engine: Pushable) -> dict[str, Any]:
    engine.engine.send(SetPolicy("off"))
    engine.run(*asked())
    return bits(engine, asked())


def test_every_output_is_a_text_of_its_grammar(engine: Pushable, plain: dict[str, Any]) -> None:
    for r in asked():
        grammar, finish = r.sampling.structured_outputs, engine.said[r.id][-1].finish_reason
        if grammar is None:
            continue
        found = text(engine, r.id)
        compiled = Compiler(*_model(engine)).compile(grammar)
        inner = [token for token in engine.tokens(r.id) if token != end_token(engine)]
        assert compiled.consume_tokens(inner), found
        assert compiled.is_accepting() or finish == "length"
        if finish == "stop":
            assert engine.tokens(r.id)[-1] == end_token(engine)
            if grammar.kind == "json_schema":
                assert json.loads(found)["b"] in ("x", "yy", None)
            elif grammar.kind == "regex":
                assert re.fullmatch(grammar.text, found)
    ends = [engine.said[r.id][-1].finish_reason for r in asked() if r.sampling.structured_outputs]
    assert ends.count("stop") >= 6


def _model(engine: Pushable) -> tuple[Any, int, list[int]]:
    return Path(engine.settings.model), engine.info.vocab_size, engine.info.eos_token_ids


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_speculation_changes_no_bit(
    engine: Pushable, plain: dict[str, Any], strategy: Strategy
) -> None:
    engine.engine.send(SetPolicy("fixed", strategy))
    engine.run(*asked())
    assert bits(engine, asked()) == plain
    said = [o for r in asked() if r.sampling.structured_outputs for o in engine.said[r.id]]
    assert sum(o.drafted for o in said) > 0 and sum(o.accepted for o in said) > 0


@once
def test_no_output_contains_a_multi_token_bad_word(engine: Pushable) -> None:
    engine.engine.send(SetPolicy("off"))
    tokens, _ = engine.run(request(1, None, temperature=0.0))["r1"]
    words = tuple({(*tokens[at : at + size],) for at in range(20) for size in (2, 3)})
    batch = [request(i, None, temperature=float(i - 1), bad_words=words) for i in (1, 2)]
    outputs = engine.run(*batch)
    assert outputs["r1"][0][0] == tokens[0] and outputs["r1"][0][1] != tokens[1]
    for found, _ in outputs.values():
        pairs = {(*found[at : at + 2],) for at in range(len(found))}
        assert pairs.isdisjoint(words) and len(found) > 20
    for strategy in STRATEGIES[1:]:
        engine.engine.send(SetPolicy("fixed", strategy))
        assert engine.run(*batch) == outputs


@once
def test_structured_request_has_the_same_bits_alone_and_batched(
    engine: Pushable, plain: dict[str, Any]
) -> None:
    engine.engine.send(SetPolicy("off"))
    for r in asked()[:4]:
        engine.run(r)
    assert bits(engine, asked()[:4]) == {r.id: plain[r.id] for r in asked()[:4]}


def test_preempted_or_resumed_structured_request_keeps_its_bits(
    settings: EngineSettings, engine: Pushable, plain: dict[str, Any]
) -> None:
    drafts = {"policy": "fixed", "sd_strategy": "eagle:3x2x6"}
    scarce = Pushable(replace(settings, pages=12, max_model_len=96, **drafts))
    scarce.run(*asked())
    assert scarce.engine.gauges()["preemptions"] > 0
    assert bits(scarce, asked()) == plain
    for r in asked()[:12]:
        engine.run(r)
        tokens = engine.tokens(r.id)
        half = tokens[: len(tokens) // 2]
        rest = engine.run(msgspec.structs.replace(r, generated=half))
        assert rest[r.id][0] == tokens[len(half) :]


@once
def test_a_grammar_is_compiled_once(engine: Pushable, plain: dict[str, Any]) -> None:
    before = engine.engine.gauges()
    engine.run(*(request(i, GRAMMARS[0]) for i in range(3)))
    after = engine.engine.gauges()
    assert after["structures_compiled"] == before["structures_compiled"]
    assert after["structures_cached"] == before["structures_cached"] + 3


@once
def test_idle_engine_reads_the_tokenizer_ahead(settings: EngineSettings) -> None:
    idle = Pushable(settings)
    compiler = idle.engine._structures._compiler
    assert "_tokenizer" not in vars(compiler)
    while idle.engine.use_idle_time():
        pass
    assert "_tokenizer" in vars(compiler)


@once
def test_engine_polls_when_waiting_only_for_a_grammar(
    engine: Pushable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    go, compiler = threading.Event(), engine.engine._structures._compiler
    original = compiler.start

    def slow(grammar: Grammar) -> Any:
        assert go.wait(60)
        return original(grammar)

    monkeypatch.setattr(compiler, "start", slow)
    patience_ms: list[int] = []

    class Commands:
        def poll(self, timeout_ms: int) -> int:
            patience_ms.append(timeout_ms)
            if len(patience_ms) == 1:
                engine.submit(request(1, Grammar(kind="regex", text="[a-e]{9}")))
            if len(patience_ms) == 9:
                go.set()
            time.sleep(timeout_ms / 1e3)
            return 0

    monkeypatch.setattr(assembly, "assemble", lambda *_, **__: (engine.engine, engine.info))
    monkeypatch.setattr(Engine, "finished", property(lambda it: len(patience_ms) > 9 and it.idle))
    started = replace(engine.settings, parent=os.getppid(), directory=tmp_path)
    process.serve(started, Commands(), lambda _: None)
    assert patience_ms[1:9] == [process.BUSY_POLL_MS] * 8
    assert patience_ms.count(0) > 2, "steps follow each other"


@once
def test_structured_output_without_a_next_token_ends_with_reason(engine: Pushable) -> None:
    for grammar, says in (
        (Grammar(kind="regex", text="ab~"), "no token of this model"),  # no token has a tilde
        (Grammar(kind="lark", text="start: ("), "does not compile"),
    ):
        engine.run(request(1, grammar), request(2, None))
        last = engine.said["r1"][-1]
        assert last.finish_reason == "error" and last.error is not None
        assert last.error[0] == "structure_failed" and says in last.error[1]
        assert engine.said["r2"][-1].finish_reason in ("stop", "length")


@once
def test_failed_sequences_are_not_counted_as_decodes(engine: Pushable) -> None:
    for policy in (SetPolicy("off"), SetPolicy("fixed", STRATEGIES[2])):
        engine.engine.send(policy)
        engine.submit(request(1, Grammar(kind="regex", text="a{2}~")), request(2, None))
        failed = 0
        while not engine.engine.idle:
            engine.said.clear()
            engine.step()
            if (cycle := engine.engine.last_cycle) is not None:
                errors = sum(output.error is not None for output in engine.said.get("r1", []))
                failed += errors
                assert len(cycle.accepted) == cycle.context.decoding - errors
                assert 0 <= sum(cycle.accepted) <= cycle.drafted
        assert failed == 1


@pytest.mark.parametrize("settings", mostly_long(NAMES, "special marks"), indirect=True)
@pytest.mark.parametrize("grammar", GROWING, ids=lambda grammar: grammar.kind)
def test_mask_work_limit_ends_a_request_alike_in_any_batch(
    engine: Pushable, grammar: Grammar
) -> None:
    """Alone, in company and under every strategy it has the same tokens and the same error."""
    bias = {spelling(engine).token_to_id("a"): 100.0}
    biased = request(1, grammar, max_tokens=400, logit_bias=bias)
    other, same = request(2, None, max_tokens=40), request(3, GRAMMARS[1])
    found = list[tuple[list[int], tuple[str, str] | None]]()
    company = list[list[tuple[list[int], list[float]]]]()
    for strategy in (None, *STRATEGIES):
        engine.engine.send(SetPolicy("fixed", strategy) if strategy else SetPolicy("off"))
        for batch in ([biased], [biased, other, same]):
            outputs = engine.run(*batch)
            found.append((engine.tokens("r1"), engine.said["r1"][-1].error))
            company.append([outputs[id] for id in ("r2", "r3") if id in outputs])
    tokens, error = found[0]
    assert 15 < len(tokens) < 400 and error is not None and error[0] == "structure_failed"
    assert f"after {len(tokens)} tokens" in error[1] and "too much work" in error[1]
    assert found == [found[0]] * 8
    assert company == [[], company[1]] * 4


@pytest.mark.parametrize("settings", mostly_long(NAMES, "qwen3", "special marks"), indirect=True)
def test_masks_after_drafts_equal_masks_after_tokens(engine: Pushable) -> None:
    """The slow twin: a matcher that has only ever seen the tokens before."""
    model, vocab_size, eos = _model(engine)
    structures = Structures(model, vocab_size, eos)
    words = -(-vocab_size // 32)
    draw = np.random.default_rng(3)
    stops = {*eos, spelling(engine).token_to_id("_")}
    for grammar in GRAMMARS:
        tree = structures.of(grammar, stops)
        while tree is not None and not tree.ready:
            time.sleep(0.001)
        start = Compiler(model, vocab_size, eos).compile(grammar)
        assert tree is not None
        committed: list[int] = []
        for _ in range(2):
            path: list[int] = []
            for step in range(6):
                mask_W = np.zeros(words, np.int32)
                if step == 3:  # another branch of the tree
                    path = path[:1]
                tree.fill(path, mask_W)
                slow = start.deep_copy()
                assert slow.consume_tokens([*committed, *path])
                bits = np.unpackbits(mask_W.view(np.uint8), count=vocab_size, bitorder="little")
                follow = [id for id in range(vocab_size) if slow.deep_copy().consume_token(id)]
                expected = {*follow, *(stops if slow.is_accepting() else ())}
                assert {*np.flatnonzero(bits).tolist()} == expected
                if not expected - stops:
                    break
                path.append(int(draw.choice([*(expected - stops)])))
            outside = np.zeros(words, np.int32)
            tree.fill([*path, *eos, *eos], outside)
            assert (outside == -1).all()
            committed.append(path[0]) if path else None
            tree.commit(path[:1])


def test_outputs_of_generated_schemas_are_valid(
    engine: Pushable, record_property: Callable[[str, object], None]
) -> None:
    """`benchmarks.record schemas` asks for a thousand. A schema with numbers may not end within
    max_tokens.
    """
    count = int(os.environ.get("TLT_SCHEMAS", "24"))
    schemas = [Schemas(seed).whole() for seed in range(count)]
    engine.engine.send(SetPolicy("fixed", STRATEGIES[1]))
    grammars = [grammar_of("json_schema", json.dumps(schema)) for schema in schemas]
    given = {"max_tokens": 400, "logit_bias": {end_token(engine): 2.0}}
    batch = [
        request(i, grammar, temperature=float(i % 2), **given) for i, grammar in enumerate(grammars)
    ]
    engine.run(*batch)
    ended = tokens = accepted = 0
    for r, schema in zip(batch, schemas, strict=True):
        tokens += len(engine.tokens(r.id))
        accepted += sum(output.accepted for output in engine.said[r.id])
        last = engine.said[r.id][-1]
        assert last.error is None, (schema, last.error)
        if last.finish_reason == "stop":
            ended += 1
            jsonschema.validate(json.loads(text(engine, r.id)), schema, Draft202012Validator)
    assert ended >= 0.8 * count and accepted > 0
    figures = {"schemas": count, "ended": ended, "tokens": tokens, "accepted": accepted}
    record_property("counted", json.dumps(figures))
