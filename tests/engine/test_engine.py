"""The whole engine on tiny random checkpoints: every strategy, memory and chunking gives the same
tokens and the same bits.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numba.core.event import install_recorder

from tests.engine.pushing import cpu_settings
from tests.engine.slow_rows import slow_rows
from tests.engine.tiny import VOCAB, write_eagle, write_target
from tlt_kernels.cpu.compiled import kernels
from tlt_server.engine.devices.choice import Gpu
from tlt_server.engine.settings import EngineSettings
from tlt_server.engine.start import assembly
from tlt_server.engine.start.assembly import assemble
from tlt_server.errors import ModelError, StartupError
from tlt_server.speculation.policies.fixed import Fixed
from tlt_server.wire.commands import Abort, SetPolicy, Submit
from tlt_server.wire.events import CHECKED
from tlt_server.wire.records import (
    OFF,
    Arms,
    DraftLimits,
    GenerateRequest,
    Pin,
    Sampling,
    StepContext,
    StepOutput,
    Strategy,
    parse_strategy,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    root = tmp_path_factory.mktemp("tiny")
    return cpu_settings(write_target(root / "target"), write_eagle(root / "drafter"))


def prompt(i: int) -> list[int]:
    draw = np.random.default_rng(i // 3)  # three requests share a prompt
    return draw.integers(0, VOCAB - 1, 5 + 11 * (i % 4)).tolist()


PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
REPORTS = {"logprobs": 4, "raw_logprobs": True, "prompt_logprobs": 2}
SAMPLINGS = {
    "sampled": Sampling(max_tokens=40),
    "cold": Sampling(max_tokens=40, temperature=0.4),
    "greedy": Sampling(max_tokens=40, temperature=0.0),
    "filtered": Sampling(max_tokens=40, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01),
    "penalised": Sampling(
        max_tokens=40, temperature=0.5, min_tokens=12, logit_bias={3: 2.0, 7: -50.0}, **PENALTIES
    ),
    "reported": Sampling(max_tokens=24, temperature=0.5, ignore_eos=True, **REPORTS),
}


def requests(count: int = 12, sampling: str = "") -> list[GenerateRequest]:
    kinds = list(SAMPLINGS)
    return [
        GenerateRequest(
            id=f"r{i}",
            token_ids=prompt(i),
            sampling=SAMPLINGS[sampling or kinds[i % len(kinds)]],
            seed=1000 + i,
            group_id=f"g{i // 3}",
        )
        for i in range(count)
    ]


Said = dict[str, list[StepOutput]]


def run(settings: EngineSettings, batch: list[GenerateRequest]) -> tuple[Said, dict[str, float]]:
    engine, info = assemble(settings)
    engine.send(Submit(batch))
    said: Said = {r.id: [] for r in batch}
    passes = accepted = 0
    while not engine.idle:
        for output in engine.step():
            said[output.id].append(output)
            assert output.weight_version == (info.weight_version if output.token_ids else "")
        engine.scheduler.check()
        if cycle := engine.last_cycle:
            passes += 1
            accepted += sum(cycle.accepted)
    return said, {"passes": passes, "accepted": accepted, "pages": info.pages, **engine.gauges()}


def bits(said: Said) -> dict[str, tuple[object, ...]]:
    """Everything reported about tokens, joined over steps."""
    joined: dict[str, tuple[object, ...]] = {}
    for i, outputs in said.items():
        assert outputs[-1].finish_reason in ("stop", "length"), outputs[-1]
        joined[i] = (
            [t for o in outputs for t in o.token_ids],
            np.array([x for o in outputs for x in o.logprobs], np.float32).tobytes(),
            np.array([x for o in outputs for x in o.raw_logprobs or []], np.float32).tobytes(),
            [msgspec.to_builtins(x) for o in outputs for x in o.top_logprobs or []],
            [msgspec.to_builtins(x) for o in outputs for x in o.prompt_logprobs or []],
            outputs[-1].finish_reason,
        )
    return joined


@pytest.fixture(scope="module")
def reference(base: EngineSettings) -> dict[str, tuple[object, ...]]:
    """One request at a time, no speculation, whole prompts."""
    alone: dict[str, tuple[object, ...]] = {}
    for request in requests():
        alone |= bits(run(replace(base, max_running=1), [request])[0])
    return alone


def fixed(name: str, **others: object) -> dict[str, object]:
    return {"policy": "fixed", "sd_strategy": name, **others}


CHANGES: dict[str, dict[str, object]] = {
    "batched": {},
    "small chunks": {"max_rows": 3},
    "few pages": {"pages": 9},
    "eagle small": fixed("eagle:2x2x4"),
    "eagle large": fixed("eagle:6x4x24"),
    "eagle, few pages, small chunks": fixed("eagle:4x3x9", pages=9, max_rows=5),
    "history": fixed("history:6x3x12"),
    "beg": {"policy": "beg"},
    "goodput": {"policy": "goodput"},
    "page of 1": fixed("eagle:3x2x6", page_size=1),
    "page of 64": fixed("history:3x2x6", page_size=64),
    "one thread": {"threads": 1},
}


@pytest.mark.parametrize("strategy", [Strategy(), Strategy("eagle", 4, 3, 9)])
def test_skipping_sequences_in_a_step_changes_no_bit(
    base: EngineSettings, reference: dict[str, tuple[object, ...]], strategy: Strategy
) -> None:
    engine, _ = assemble(base)
    engine.choice.policy = Fixed(strategy)
    left_out = slow_rows(engine.scheduler)
    owned = [
        msgspec.structs.replace(each, owner="many" if i else "few")
        for i, each in enumerate(requests())
    ]
    engine.send(Submit(owned))
    said: Said = {each.id: [] for each in owned}
    while not engine.idle:
        for output in engine.step():
            said[output.id].append(output)
        engine.scheduler.check()
    assert len(set().union(*left_out)) > 2, "they take turns"
    assert bits(said) == reference


@pytest.mark.parametrize("name", CHANGES)
def test_settings_of_pages_rows_and_chunks_change_no_bit(
    name: str, base: EngineSettings, reference: dict[str, tuple[object, ...]]
) -> None:
    settings = replace(base, **CHANGES[name])
    said, counts = run(settings, requests())
    assert bits(said) == reference
    if "few pages" in name:
        assert counts["preemptions"] > 0
    assert counts["pages_free"] == counts["pages"] and counts["running"] == 0, "pages leak"


LIMITS = {
    "nothing": (False, 0),
    "one row": (DraftLimits(max_rows=2), 1),
    "three rows": (DraftLimits(max_rows=4), 3),
    "no depth": (DraftLimits(max_depth=1), 4),  # the children of the root, and a branch
    "another drafter": (DraftLimits(drafter="history"), 0),
    "this drafter": (DraftLimits(drafter="eagle"), 92),
}


def test_drafts_stay_within_the_limits_of_their_request(
    base: EngineSettings, reference: dict[str, tuple[object, ...]]
) -> None:
    of = {f"r{i}": LIMITS[name] for i, name in enumerate(2 * [*LIMITS])}
    batch = [msgspec.structs.replace(each, sd=of[each.id][0]) for each in requests()]
    said, _ = run(replace(base, **fixed("eagle:4x3x24")), batch)
    assert bits(said) == reference
    for id, outputs in said.items():
        drafted = [output.drafted for output in outputs]
        limits, most = of[id]
        assert max(drafted) <= most and (max(drafted) > 0) == (most > 0), (limits, drafted)


def test_step_without_a_speculable_request_drafts_no_token(base: EngineSettings) -> None:
    """Else their time would teach that drafting costs nothing."""
    engine, _ = assemble(replace(base, **fixed("eagle:4x1x5")))
    limits = DraftLimits(drafter="history")
    engine.send(Submit([msgspec.structs.replace(requests(1, "greedy")[0], sd=limits)]))
    cycles = []
    while not engine.idle:
        engine.step()
        cycles.append(engine.last_cycle)
    seen = {(c.strategy, sum(c.context.bound.values())) for c in cycles if c and c.context.decoding}
    assert seen == {(OFF, 1)}


def test_history_drafts_are_accepted_where_text_repeats(base: EngineSettings) -> None:
    greedy = requests(6, "greedy")
    plain, plain_counts = run(base, greedy)
    drafted, counts = run(replace(base, **fixed("history:6x3x12")), greedy)
    assert bits(drafted) == bits(plain)
    assert counts["accepted"] > 0 and counts["passes"] < plain_counts["passes"]
    outputs = [output for said in drafted.values() for output in said]
    assert sum(o.accepted for o in outputs) == counts["accepted"] <= sum(o.drafted for o in outputs)


def test_resubmitting_a_partial_output_continues_the_same_stream(base: EngineSettings) -> None:
    request = requests(1, "sampled")[0]
    whole = bits(run(base, [request])[0])[request.id][0]
    assert isinstance(whole, list) and len(whole) > 10
    left = msgspec.structs.replace(request.sampling, max_tokens=request.sampling.max_tokens - 7)
    tokens = request.token_ids + whole[:7]
    rest = msgspec.structs.replace(request, token_ids=tokens, sampling=left)
    assert bits(run(base, [rest])[0])[request.id][0] == whole[7:]


def test_policies_change_between_steps_without_changing_tokens(base: EngineSettings) -> None:
    batch = requests(6)
    expected = bits(run(base, batch)[0])
    engine, _ = assemble(base)
    engine.send(Submit(batch))
    said: Said = {r.id: [] for r in batch}
    turns = [
        SetPolicy("fixed", Strategy("eagle", 4, 3, 9)),
        SetPolicy("off"),
        SetPolicy("fixed", Strategy("history", 4, 2, 6)),
        SetPolicy("beg"),
        SetPolicy("beg", arms=Arms(("history",)), pins=(Pin(1, 9, Strategy("eagle", 2, 1, 3)),)),
    ]
    for step in range(500):
        if step % 5 == 4:
            engine.send(turns[step // 5 % len(turns)])
        for output in engine.step():
            said[output.id].append(output)
        if engine.idle:
            break
    assert bits(said) == expected
    switches = engine.choice.switches.take()
    assert switches[0].reason == "start" and "policy" in {switch.reason for switch in switches[1:]}
    assert {"off", "eagle:4x3x9", "eagle:2x1x3"} <= {switch.strategy for switch in switches}


def test_restored_policy_keeps_its_estimates(base: EngineSettings) -> None:
    engine, _ = assemble(replace(base, policy="beg"))
    before = engine.choice.policy
    for command in (SetPolicy("off"), SetPolicy("beg", arms=Arms(("history",)))):
        engine.send(command)
        engine.step()
        assert engine.choice.policy is not before
    engine.send(SetPolicy("beg"))
    engine.step()
    assert engine.choice.policy is before


def test_step_reports_the_context_of_its_strategy_choice(base: EngineSettings) -> None:
    engine, _ = assemble(base)
    seen: list[StepContext] = []

    class Watching(Fixed):
        def choose(self, context: StepContext) -> Strategy:
            seen.append(context)
            return super().choose(context)

    engine.choice.policy = Watching(Strategy("eagle", 4, 1, 5))
    engine.send(Submit(requests(3)))
    while not engine.idle:
        engine.step()
        cycle = engine.last_cycle
        assert cycle is None or cycle.context is seen[-1], "it was worked out twice"
    assert {context.decoding for context in seen} > {0, 3}


def test_abort_frees_pages_and_slots_and_reports_partials(base: EngineSettings) -> None:
    engine, info = assemble(base)
    engine.send(Submit(requests(6)))
    for _ in range(5):
        engine.step()
    engine.send(Abort(["r1"]))
    ended = [o for o in engine.step() if o.finish_reason]
    assert [(o.id, o.finish_reason) for o in ended] == [("r1", "abort")]
    engine.send(Abort([]))
    assert not [o for o in engine.step() if o.finish_reason]
    engine.send(Abort([], all=True))
    ended = [o for o in engine.step() if o.finish_reason]
    assert {o.id for o in ended} == {"r0", "r2", "r3", "r4", "r5"} and engine.idle
    assert engine.gauges()["pages_free"] == info.pages


@pytest.mark.parametrize("name", ["eagle large", "small chunks", "page of 1"])
def test_scoring_a_prompt_alone_gives_the_same_bits(name: str, base: EngineSettings) -> None:
    others, full = requests(6, "sampled"), requests(4, "reported")
    asked = Sampling(max_tokens=0, prompt_logprobs=2)
    scored = [msgspec.structs.replace(r, id=f"s{i}", sampling=asked) for i, r in enumerate(full)]
    # A prompt of one row.
    scored.append(msgspec.structs.replace(full[0], id="one", token_ids=[5], sampling=asked))
    said, counts = run(replace(base, **CHANGES[name]), others + scored)
    expected = bits(run(base, full)[0])
    for i, request in enumerate(full):
        [output] = said[f"s{i}"]
        assert output.token_ids == output.logprobs == []
        assert (output.finish_reason, output.drafted) == ("length", 0)
        assert bits(said)[f"s{i}"][4] == expected[request.id][4]
        assert len(output.prompt_logprobs or []) == len(request.token_ids)
    assert [o.prompt_logprobs for o in said["one"]] == [[None]]
    assert bits({r.id: said[r.id] for r in others}) == bits(run(base, others)[0])
    assert counts["pages_free"] == counts["pages"]


def test_impossible_batch_ends_with_one_typed_error_per_request(base: EngineSettings) -> None:
    engine, _ = assemble(replace(base, pages=8))
    big = msgspec.structs.replace(requests(1)[0], id="big", sampling=Sampling(max_tokens=500))
    engine.send(Submit([*requests(2), big]))
    outputs = engine.step()
    ends = {o.id: (o.finish_reason, o.error and o.error[0]) for o in outputs}
    assert ends == dict.fromkeys(("r0", "r1", "big"), ("error", "invalid_request"))
    assert engine.idle


def test_impossible_policy_is_refused_and_active_policy_stays(
    base: EngineSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, _ = assemble(replace(base, drafter="history"))
    before = engine.choice.policy
    engine.send(SetPolicy("fixed", Strategy("eagle", 2, 2, 4)))
    engine.send(SetPolicy("no such policy"))
    engine.step()
    assert engine.choice.policy is before
    assert capsys.readouterr().err.count("is refused") == 2


@pytest.mark.contains_faults
def test_request_with_invalid_sampling_ends_alone(base: EngineSettings) -> None:
    engine, _ = assemble(base)
    good = requests(2)
    engine.send(Submit(good))
    bad = msgspec.structs.replace(good[0], id="bad", sampling=Sampling(top_k=2**40))
    engine.send(Submit([bad]))
    ended = [o for o in engine.step() if o.finish_reason]
    assert [(o.id, o.error and o.error[0]) for o in ended] == [("bad", "engine_failed")]
    while not engine.idle:
        engine.step()
        engine.scheduler.check()


def test_unavailable_memory_is_refused_with_value_and_remedy(base: EngineSettings) -> None:
    with pytest.raises(StartupError, match="lower pages, page_size or kv_memory_mb"):
        assemble(replace(base, pages=2_000_000_000))
    with pytest.raises(StartupError, match="exceeds the model's 1024 positions"):
        assemble(replace(base, max_model_len=5000))
    with pytest.raises(StartupError, match="raise it to"):
        assemble(replace(base, kv_memory_mb=1))
    _, info = assemble(replace(base, pages=3))
    assert info.max_model_len == 48, "what the pages hold limits a sequence"


def cut(source: str, target: Path) -> str:
    """Return a copy of a checkpoint whose tensors end too early."""
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])
    return str(target)


UNFIT: dict[str, Callable[[EngineSettings, Path], dict[str, object]]] = {
    "target": lambda base, path: {"model": cut(base.model, path)},
    "drafter": lambda base, path: {"drafter": cut(str(base.drafter), path)},
    "memory": lambda base, path: {"kv_memory_mb": 1},
    "device": lambda base, path: {"device": "cuda"},
}


@pytest.mark.parametrize("what", UNFIT)
def test_unfit_settings_are_refused_before_kernels_and_weights(
    base: EngineSettings, tmp_path: Path, what: str
) -> None:
    begun: list[str] = []
    with pytest.MonkeyPatch.context() as patch, pytest.raises((StartupError, ModelError)):
        patch.setattr(assembly, "look", lambda: Gpu(unusable="torch finds no GPU"))
        assemble(
            replace(base, **UNFIT[what](base, tmp_path / "cut")),
            on_progress=lambda name, done, of: begun.append(name),
        )
    assert begun[-1] == ("choose device" if what == "device" else CHECKED)


def test_all_kernels_are_compiled_at_start_and_not_in_a_step(
    base: EngineSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, info = assemble(base)
    assert all(kernel.ready for kernel in kernels())
    assert info.prepared == "all of its kernels are compiled"
    names = ("eagle:4x2x9", "eagle:1x1x2", "history:8x2x9", "history:7x1x8", "history:8x4x33")
    policies = [
        *(SetPolicy("fixed", parse_strategy(name)) for name in names),
        *(SetPolicy(name) for name in ("off", "beg", "goodput")),
    ]
    limits = (True, False, DraftLimits(max_depth=1), DraftLimits(max_rows=2))
    with install_recorder("numba:compile") as compiled:
        for n, policy in enumerate(policies):
            engine.send(policy)
            batch = [
                msgspec.structs.replace(request, id=f"{n}-{request.id}", sd=limits[i % len(limits)])
                for i, request in enumerate(requests())
            ]
            engine.send(Submit(batch))
            while not engine.idle:
                assert not any(output.error for output in engine.step())
    assert not compiled.buffer
    said = capsys.readouterr().err
    for name in (*(f"fixed with {each}" for each in names), "off", "beg", "goodput"):
        assert f"policy {name} is in force: all of its kernels are compiled" in said


def test_engine_reports_its_resolved_settings(base: EngineSettings) -> None:
    phases: list[tuple[str, str]] = []
    settings = replace(base, device=None, max_running=None, max_rows=None)
    gpu = Gpu(unusable="torch finds no GPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "look", lambda: gpu)
        engine, info = assemble(
            settings, lambda name, seconds, detail: phases.append((name, detail))
        )
    assert (info.device, info.gpu, info.dtype, info.attention) == ("cpu", "", "float32", "cpu")
    assert info.graphs is False
    scheduler = engine.scheduler
    assert info.max_running == scheduler.running.max_running == 64
    assert info.max_rows == scheduler.max_rows == 512
    assert info.choices == {"device": "cpu: torch finds no GPU"}
    why = "cpu, float32, attention cpu, up to 64 sequences | device cpu: torch finds no GPU"
    assert ("choose device", why) in phases
