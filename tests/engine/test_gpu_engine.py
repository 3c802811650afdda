"""The GPU engine on the interpreter, with requests of every kind: plain decoding has the tokens and
reports of the CPU engine, and neither speculation nor preemption nor company changes a bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as with_fields

from tests.engine.adapters import write_adapter
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
    prompt,
    request,
)
from tests.engine.pushing import Pushable
from tests.engine.tiny import SMALLEST, write_alphabet
from tlt_server.engine.gpu.steps.drafts import tables
from tlt_server.engine.gpu.steps.extend import Extend
from tlt_server.engine.gpu.steps.reports import best_of
from tlt_server.engine.settings import EngineSettings
from tlt_server.engine.start.assembly import assemble
from tlt_server.grammars.compiler import Compiler
from tlt_server.speculation.calibration import OnlineTable
from tlt_server.wire.records import DraftLimits, GenerateRequest, Grammar, Strategy

TREE, CHAIN = Strategy("eagle", 3, 2, 6), Strategy("eagle", 3, 1, 4)
HISTORY = Strategy("history", 3, 2, 4)
FEW, OF_HISTORY = DraftLimits(max_depth=2, max_rows=2), DraftLimits(drafter="history")
STOPS = {"ignore_eos": False, "stop_token_ids": tuple(range(0, 60, 3))}
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3}
ALLOWED = (5, 6, 9, 11, 17, 40)
BAD = ((5, 5), (6, 6), (5, 6, 5), (9,))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
REGEX = Grammar(kind="regex", text="(ab|cd){2,4}[0-9]*")
LARK = Grammar(kind="lark", text='start: /[a-e]+/ ("," /[0-9]{1,2}/)*')
JSON = Grammar(kind="json_schema", text=json.dumps(SCHEMA | {"additionalProperties": False}))
ENDLESS = Grammar(kind="regex", text="([a-d][0-9])+")
STUCK = Grammar(kind="regex", text="ab~")  # no token has a tilde


def structured(
    i: int, grammar: Grammar, length: int = 5, max_tokens: int = 4, **sampling: Any
) -> GenerateRequest:
    made = request(i, length, max_tokens, ignore_eos=False, **sampling)
    return with_fields(made, sampling=with_fields(made.sampling, structured_outputs=grammar))


def kinds() -> dict[str, list[GenerateRequest]]:
    """Return one of each kind of device sampling, edit of logits, report, structure and adapter.
    Three run at a time. `plain 5` finds a page of `plain 4`, which is gone by then.
    """
    first = prompt(4, PAGE + 2)
    made = {
        "plain": [
            with_fields(request(0, 3, 8), sd=FEW),
            with_fields(request(1, 9, temperature=0.0), sd=OF_HISTORY),
            request(2, 6, temperature=0.6, **STOPS),
            request(3, 5, temperature=0.8, top_k=12, top_p=0.9),
            with_fields(request(4, max_tokens=3), token_ids=first),
            with_fields(request(5, max_tokens=5), token_ids=[*first, 7]),
            with_fields(request(6, 4, temperature=0.7, min_p=0.02), sd=False),
        ],
        "edited": [
            request(0, 6, 10, repetition_penalty=1.3, presence_penalty=0.1),
            request(2, 5, 10, temperature=0.0, **PENALTIES),
            request(3, 15, 8, logprobs=2, raw_logprobs=True, prompt_logprobs=3, **PENALTIES),
            request(
                4,
                3,
                9,
                min_tokens=5,
                logit_bias={7: 2.5, 61: -80.0},
                ignore_eos=False,
                stop_token_ids=tuple(range(50)),
            ),
            request(5, 4, 6, top_k=9, frequency_penalty=-0.6, logit_bias={11: 1.0}),
            request(6, 5, 8, allowed_token_ids=ALLOWED, bad_words=((5,), (9,))),
            request(7, 4, 8, allowed_token_ids=ALLOWED, **PENALTIES),
        ],
        "reported": [
            request(0, 3, logprobs=2, raw_logprobs=True),
            request(1, 5),
            request(2, 4, logprobs=5, temperature=0.0),
            request(3, 15, logprobs=20, temperature=0.8, top_k=12, top_p=0.9),
            request(4, 4, raw_logprobs=True, temperature=0.6, **STOPS),
            request(5, 4, 2, logprobs=1, repetition_penalty=1.3),
            request(6, 5, 2, logprobs=64, temperature=1.4),
        ],
        "scored": [
            request(3, 9, 4, prompt_logprobs=2),  # read in pieces
            request(5, 8, 0, prompt_logprobs=1),
            request(6, 1, 7, prompt_logprobs=0, temperature=0.0, repetition_penalty=1.5),
        ],
        "structured": [
            structured(0, REGEX, 6, temperature=0.0),
            structured(2, REGEX, 4, repetition_penalty=1.3, logit_bias={5: 1.0}),
            structured(3, LARK, 15, logprobs=2, raw_logprobs=True),
            structured(4, LARK, 3, top_k=5),
            structured(5, JSON, 4),
            structured(6, Grammar(kind="regex", text="[abc]")),
            request(8, 5, 8, allowed_token_ids=(5, 6, 9, 11), bad_words=BAD),
        ],
        "adapted": [
            with_fields(request(0, 6, 5), lora="a"),
            request(1, 4, 4),
            with_fields(request(2, 5, 5, temperature=0.0, presence_penalty=0.4), lora="b"),
            with_fields(request(3, 15, 4, logprobs=2, raw_logprobs=True), lora="a"),
            with_fields(structured(4, REGEX), lora="b"),
        ],
    }
    return {
        kind: [with_fields(each, id=each.id.replace("r", f"{kind} ")) for each in requests]
        for kind, requests in made.items()
    }


KINDS = kinds()
IDS = {kind: [each.id for each in requests] for kind, requests in KINDS.items()}
CASES = [
    pytest.param(
        kind,
        strategy,
        id=f"{kind}-{name}",
        marks=() if name == "tree" and kind not in ("edited", "scored") else pytest.mark.long,
    )
    for kind in KINDS
    for name, strategy in {"tree": TREE, "chain": CHAIN, "history": HISTORY}.items()
]
Bits = dict[str, dict[str, tuple[object, ...]]]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSettings]:
    root = tmp_path_factory.mktemp("smallest")
    with patched_once():
        made = checkpoints(root)
        write_alphabet(root / "base", SMALLEST)
        write_adapter(root / "a", root / "base", 0)
        write_adapter(root / "a2", root / "base", 1)
        write_adapter(root / "b", root / "base", 5, rank=3, targets=("k_proj", "up_proj"))
        yield replace(made, max_loras=2, max_lora_rank=8)


def load(engine: Pushable, name: str, path: str) -> None:
    root = Path(str(engine.settings.weight_root))
    report = engine.push(root / path, role="adapter", adapter=name)
    assert report.result == "committed", report.error


def loaded(settings: EngineSettings) -> Pushable:
    engine = Pushable(settings)
    for name in ("a", "b"):
        load(engine, name, name)
    return engine


@pytest.fixture(scope="module")
def twin(settings: EngineSettings) -> Pushable:
    """The CPU engine, which has run all of it."""
    cpu = loaded(on_cpu(settings))
    for requests in KINDS.values():
        cpu.run(*requests)
    cpu.run(with_fields(structured(7, STUCK), id="stuck"))
    return cpu


@pytest.fixture(scope="module")
def engine(settings: EngineSettings) -> Pushable:
    return loaded(drafting(settings, TREE.drafter, TREE.depth, TREE.width, TREE.rows))


@pytest.fixture(scope="module")
def plain(engine: Pushable) -> Bits:
    choose(engine, None)
    for requests in KINDS.values():
        engine.run(*requests)
    assert engine.said["plain 5"][0].cached_tokens == PAGE
    return {kind: bits(engine, ids) for kind, ids in IDS.items()}


def assert_all_agree(engine: Pushable, twin: Pushable, ids: list[str]) -> None:
    assert_agree(engine, twin, ids)
    for id in ids:
        assert_reports_agree(engine, twin, id)
        scores = (joined(each.said[id], "prompt_logprobs") for each in (engine, twin))
        assert_alternatives_agree(*scores)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_decoding_agrees_with_the_cpu(
    kind: str, engine: Pushable, plain: Bits, twin: Pushable
) -> None:
    assert_all_agree(engine, twin, IDS[kind])
    assert engine.engine.gauges()["pages_free"] == engine.info.pages
    assert engine.engine.runner.in_flight == 0


@pytest.mark.parametrize(("kind", "strategy"), CASES)
def test_speculation_changes_no_bit(
    kind: str, strategy: Strategy, engine: Pushable, plain: Bits, twin: Pushable
) -> None:
    choose(engine, strategy)
    for id in IDS[kind]:
        engine.said.pop(id, None)
    engine.submit(*KINDS[kind])
    accepted = drafted = 0
    while not engine.engine.idle:
        engine.step()
        if cycle := engine.engine.last_cycle:
            accepted, drafted = accepted + sum(cycle.accepted), drafted + cycle.drafted
    assert bits(engine, IDS[kind]) == plain[kind]
    assert_all_agree(engine, twin, IDS[kind])
    said = [output for id in IDS[kind] for output in engine.said[id]]
    assert sum(output.drafted for output in said) == drafted > 0
    assert sum(output.accepted for output in said) == accepted <= drafted
    eagle = strategy.drafter == "eagle"
    assert accepted > 0 or not eagle, "the drafter shares the noise: some of its tokens must hit"
    assert engine.engine.gauges()["pages_free"] == engine.info.pages
    if kind == "plain":
        of = [[output.drafted for output in engine.said[id]] for id in IDS[kind]]
        assert max(of[0]) <= 1, "it takes one draft row"
        assert any(of[0]) or not eagle
        assert not any(of[1]) or not eagle, "it takes another drafter's drafts only"
        assert not any(of[6]), "it is never speculated on"


@pytest.mark.parametrize(
    "kind", ["plain", *(pytest.param(k, marks=pytest.mark.long) for k in [*KINDS][1:])]
)
def test_preemption_changes_no_bit(kind: str, settings: EngineSettings, engine: Pushable) -> None:
    """Two sequences of two pages each, on three."""
    fields: dict[str, Any] = {
        "edited": PENALTIES,
        "reported": {"logprobs": 2, "raw_logprobs": True},
        "scored": {"prompt_logprobs": 1},
        "structured": {"structured_outputs": ENDLESS},
    }.get(kind, {})
    lora = "a" if kind == "adapted" else ""
    both = [request(i, PAGE - 6 - i, 11, **fields) for i in range(2)]
    both = [with_fields(each, lora=lora) for each in both]
    scarce = loaded(replace(drafting(settings, "eagle", 3, 1, 4), pages=3))
    choose(engine, None)
    for each in (engine, scarce):
        each.run(*both)
    assert bits(scarce, ["r0", "r1"]) == bits(engine, ["r0", "r1"])
    assert_all_agree(scarce, engine, ["r0", "r1"])
    gauges = scarce.engine.gauges()
    assert gauges["preemptions"] > 0
    assert gauges["pages_free"] == 3


ALONE = ["plain 0", *(pytest.param(id, marks=pytest.mark.long) for id in IDS["adapted"])]


@pytest.mark.parametrize("id", ALONE)
def test_other_requests_in_the_batch_change_no_bit(
    id: str, engine: Pushable, settings: EngineSettings, plain: Bits
) -> None:
    """Requests without an adapter run in an engine that takes none."""
    kind = id.split()[0]
    [one] = [each for each in KINDS[kind] if each.id == id]
    choose(engine, None)
    alone = engine if one.lora else Pushable(replace(settings, max_loras=0))
    alone.run(one)
    assert bits(alone, [id]) == {id: plain[kind][id]}


@pytest.mark.parametrize("id", ["edited 2", "reported 0", "structured 3"])
def test_host_prepares_one_step_ahead_of_the_gpu(id: str, engine: Pushable) -> None:
    [one] = [each for each in KINDS[id.split()[0]] if each.id == id]
    choose(engine, None)
    engine.said.pop(id, None)
    engine.submit(one)
    while id not in engine.said:
        engine.step()
    before = len(engine.tokens(id))
    assert engine.engine.runner.in_flight == 1
    engine.step()
    assert len(engine.tokens(id)) == before + 1
    assert engine.engine.runner.in_flight == 1
    engine.finish()


@pytest.mark.parametrize("flag", ["edited", "structured", "adapted"])
def test_optional_pass_parts_run_only_in_steps_that_need_them(flag: str, engine: Pushable) -> None:
    extends = engine.engine.runner.passes.extends
    choose(engine, None)
    for kind, expected in (("reported", set()), (flag, {True})):
        extends.clear()
        engine.run(KINDS[kind][0])
        found = {getattr(key, flag) for key in extends if not key.prompt_rows}
        assert found == (expected or {False})


# -- what each kind asks for -----------------------------------------------------------------------


def test_stop_ids_end_and_wait_for_min_tokens(twin: Pushable) -> None:
    assert twin.said["plain 2"][-1].finish_reason == "stop", "a stop id must have been met"
    *before, last = twin.tokens("edited 4")
    assert twin.said["edited 4"][-1].finish_reason == "stop"
    assert last < 50 <= min(before)
    assert len(before) >= 5


def test_penalties_change_sampled_tokens(twin: Pushable) -> None:
    unedited = twin.run(request(2, 5, 10, temperature=0.0))["r2"]
    assert len({*twin.tokens("edited 2")}) > len({*unedited[0]})


def test_outputs_obey_allowed_tokens_banned_tokens_and_bad_words(twin: Pushable) -> None:
    assert {*twin.tokens("edited 6")} <= {*ALLOWED} - {5, 9}
    assert {*twin.tokens("edited 7")} <= {*ALLOWED}
    tokens = twin.tokens("structured 8")
    assert len(tokens) == 8
    assert {*tokens} <= {5, 6, 11}
    assert len({*tokens}) > 1
    assert not any((*tokens[at : at + len(word)],) == word for word in BAD for at in range(8))


def test_every_structured_output_is_a_text_of_its_grammar(twin: Pushable) -> None:
    eos = twin.info.eos_token_ids
    compiler = Compiler(Path(twin.settings.model), twin.info.vocab_size, eos)
    for each in KINDS["structured"][:-1]:
        matcher = compiler.compile(each.sampling.structured_outputs)
        assert matcher.consume_tokens([id for id in twin.tokens(each.id) if id not in eos]), each.id
        assert matcher.is_accepting() or twin.said[each.id][-1].finish_reason == "length"
    assert twin.said["structured 6"][-1].finish_reason == "stop"
    assert len(twin.tokens("structured 6")) == 2


def test_failed_and_ended_sequences_are_not_counted_as_decodes(
    engine: Pushable, twin: Pushable
) -> None:
    """The step after an end was launched before the host knew of it."""
    choose(engine, TREE)
    stuck, other = with_fields(structured(7, STUCK), id="stuck"), request(8, 5, 9)
    for id in ("stuck", "r8"):
        engine.said.pop(id, None)
    engine.submit(stuck, other)
    decodes = drafts = 0
    while not engine.engine.idle:
        engine.step()
        if (cycle := engine.engine.last_cycle) is not None:
            decodes += len(cycle.accepted)
            drafts += cycle.drafted
            assert sum(cycle.accepted) <= cycle.drafted
    for each in (engine, twin):
        error = each.said["stuck"][-1].error
        assert error is not None
        assert error[0] == "structure_failed"
        assert "no token" in error[1]
    said = [output for id in ("stuck", "r8") for output in engine.said[id] if output.token_ids]
    by_prompts = sum(bool(engine.tokens(id)) for id in ("stuck", "r8"))
    assert decodes == len(said) - by_prompts
    assert drafts == sum(output.drafted for output in said)


def unreported(asked: GenerateRequest) -> GenerateRequest:
    sampling = with_fields(asked.sampling, logprobs=0, raw_logprobs=False)
    return with_fields(asked, sampling=sampling)


def test_requesting_raw_logprobs_changes_no_bit(
    engine: Pushable, plain: Bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    report = Extend.report
    monkeypatch.setattr(
        Extend, "report", lambda *given, raw: calls.append(given) or report(*given, raw=raw)
    )
    choose(engine, None)
    engine.run(*map(unreported, KINDS["reported"]))
    assert not calls, "no step reads its logits again unless it is asked to"
    assert bits(engine, IDS["reported"]) == plain["reported"]
    engine.run(KINDS["reported"][0])
    assert calls


def test_raw_logprobs_and_top_tokens_cover_each_token(twin: Pushable) -> None:
    for each in KINDS["reported"]:
        tokens, sampling = len(twin.tokens(each.id)), each.sampling
        said = twin.said[each.id]
        assert len(joined(said, "raw_logprobs")) == tokens * sampling.raw_logprobs
        assert len(joined(said, "top_logprobs")) == tokens * (sampling.logprobs > 0)
    tops = {n: joined(twin.said[f"reported {n}"], "top_logprobs") for n in (3, 6)}
    assert {len(top.token_ids) for top in tops[6]} == {64}, "the whole vocabulary"
    assert max(len(top.token_ids) for top in tops[3]) <= 12, "fewer are kept than asked for"
    assert [best_of(count) for count in (0, 1, 16, 17, 20, 1024)] == [0, 16, 16, 32, 32, 1024]


@pytest.mark.long
def test_new_adapter_takes_a_slot_after_in_flight_steps(engine: Pushable, twin: Pushable) -> None:
    choose(engine, None)
    one = with_fields(request(0, 6, 12), lora="a")
    for each in (engine, twin):
        each.said.pop("r0", None)
        each.submit(one)
        each.step(5)
        load(each, "a", "a2")
        each.finish()
    spans = engine.spans("r0")
    assert len(spans) == 2
    assert 0 < spans[1][1] < 12
    for each in (engine, twin):
        each.run(one)
    assert_agree(engine, twin, ["r0"])
    for each in (engine, twin):
        load(each, "a", "a")


def test_matmul_kernels_are_named_in_the_engines_choices(
    settings: EngineSettings, engine: Pushable
) -> None:
    kernel = "the streaming kernel is for bfloat16 and FP8"
    why = f"portable: the type is float32, and {kernel}"
    assert engine.info.products == why
    said = {}
    assemble(settings, on_phase=lambda name, seconds, detail: said.update({name: detail}))
    assert said["prepare runner"].split("; ")[1] == f"matmuls {why}"


def test_calibration_drift_is_reported(engine: Pushable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "EVERY", 1)
    choose(engine, TREE)
    engine.run(request(0, 5, 8))
    table = engine.engine.runner.passes.drafters["eagle"].calibration
    online = OnlineTable(table.prior_Z.numpy())
    online.acceptance_K, online.trials_K = table.acceptance_Z.numpy(), table.trials_Z.numpy()
    assert engine.engine.gauges()["calibration_drift"] == pytest.approx(online.drift)
    assert online.drift > 0
