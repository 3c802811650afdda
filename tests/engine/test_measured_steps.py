"""An engine that measures its steps at start, once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tlt_server.demo.workload import DRAFTER, TARGET
from tlt_server.engine.knowledge_file import NAME
from tlt_server.engine.loop import Engine
from tlt_server.engine.settings import EngineSettings
from tlt_server.engine.start.assembly import assemble
from tlt_server.engine.start.profiling import StepProfile
from tlt_server.speculation.cost import StepLoad
from tlt_server.speculation.knowledge import LearntRecord
from tlt_server.wire.commands import SetPolicy, Submit
from tlt_server.wire.records import Cycle, GenerateRequest, Sampling, StepContext, Strategy


def settings(policy: str = "off", **others: Any) -> EngineSettings:
    sizes = {"kv_memory_mb": 64, "max_running": 8} | others
    return EngineSettings(model=TARGET, drafter=str(DRAFTER), device="cpu", policy=policy, **sizes)


def test_step_times_are_measured_only_at_the_first_start(tmp_path: Path) -> None:
    details: list[str] = []
    learnt: list[list[LearntRecord]] = []
    for _ in range(2):
        phases: dict[str, str] = {}
        engine, _ = assemble(
            settings("goodput", state_dir=str(tmp_path)),
            lambda name, seconds, detail, phases=phases: phases.update({name: detail}),
        )
        details.append(phases["measure steps"])
        assert (
            engine.choice.knowledge.cost.trained and engine.idle and not engine.scheduler.holds_kv
        )
        if not learnt:
            assert all(known.ratio == 1.0 for known in engine.choice.knowledge.estimates.values())
            sampling = Sampling(max_tokens=40, ignore_eos=True)
            prompt = [*range(9), *range(9)]
            request = GenerateRequest(id="r", token_ids=prompt, sampling=sampling, seed=1)
            engine.send(Submit([request]))
            engine.step()
            while not engine.idle:
                engine.step()
            engine.choice.knowledge_file.save(engine.choice.knowledge)
        learnt.append(engine.choice.knowledge.record().learnt)
    assert learnt[0] == learnt[1] and any(learnt[0][0].tables["eagle"].trials)
    assert details[0].endswith(" steps") and details[1] == f"known from {tmp_path / NAME}"
    made_by = json.loads((tmp_path / NAME).read_text())["made_by"]
    assert made_by["model"] == "8 layers, hidden 256, MLP 512, heads 2/1, vocab 512"
    assert made_by["kernels"] and made_by["torch"] == torch.__version__
    assert (made_by["tensor_parallel"], made_by["reduction_leaves"]) == ("1", "1")


def test_step_times_are_measured_when_a_policy_needs_them(tmp_path: Path) -> None:
    engine, _ = assemble(settings(state_dir=str(tmp_path)))
    assert not engine.use_idle_time() and not engine.choice.knowledge.cost.trained
    engine.choice.knowledge.cost.observe(StepLoad("", 0, 0, 1, 1, 0, 8.0), 1e-3)
    engine.choice.knowledge_file.save(engine.choice.knowledge)
    assert not (tmp_path / NAME).exists(), "a later start would measure nothing"
    engine.send(SetPolicy("goodput"))
    engine.step()
    while engine.use_idle_time():
        assert engine.idle and not engine.scheduler.holds_kv
    assert engine.choice.knowledge.cost.trained and not engine.use_idle_time()
    assert {*engine.choice.knowledge.cost.record().draft} == {"eagle", "history"}
    assert (tmp_path / NAME).exists()


@pytest.mark.parametrize("longest", [2, 64])
def test_engine_with_a_tiny_max_model_len_measures_its_steps(longest: int) -> None:
    engine, info = assemble(settings("goodput", max_model_len=longest))
    assert info.max_model_len == longest
    assert engine.idle
    # A sequence of 2 tokens has none that is decoded.
    assert engine.choice.knowledge.cost.profiled == (longest > 2)


def cached_tokens(engine: Engine, prompt: list[int]) -> int:
    sampling = Sampling(max_tokens=2)
    engine.send(Submit([GenerateRequest(id="a", token_ids=prompt, sampling=sampling, seed=0)]))
    outputs = engine.step()
    while not engine.idle:
        outputs += engine.step()
    return max(output.cached_tokens for output in outputs)


def test_measuring_steps_keeps_prefixes_and_judges_no_drafter() -> None:
    engine, prompt = assemble(settings())[0], [*range(3, 67)]
    assert cached_tokens(engine, prompt) == 0
    cached = engine.scheduler.pool.cached
    context = StepContext(decoding=8, prefill_rows=0, mean_context=9.0, speculable=8)
    chain = Strategy("eagle", 7, 1, 8)
    cycle = Cycle(context=context, strategy=chain, rows=64, accepted=(7,) * 8, drafted=56)
    for _ in range(100):  # before weights change, each first draft is accepted
        engine.choice.guard.observe(cycle)
    engine.choice.guard.renewed()
    engine.send(SetPolicy("goodput"))
    engine.step()
    while engine.use_idle_time():
        pass
    assert engine.choice.knowledge.cost.profiled
    assert engine.choice.guard.gauges()["drafters_resting"] == 0, "judged by meaningless prompts"
    engine.scheduler.pool.check()
    assert engine.scheduler.pool.cached == cached and cached_tokens(engine, prompt) == 48


def test_slow_machine_still_measures_every_batch_and_large_steps() -> None:
    """A profile of few rows may tell that more rows cost nothing, which no small step mends."""
    engine = assemble(settings(kv_memory_mb=256, max_running=24))[0]
    profile = StepProfile(engine, 512, 1024, seconds=0.0)
    while profile.advance():
        pass
    loads = [step.load for step in profile.measured]
    plain = {load.batch for load in loads if not load.prompt_rows}
    assert {1, 8, 24} <= plain and max(load.read for load in loads) >= 256
    assert engine.choice.knowledge.cost.profiled and engine.idle
