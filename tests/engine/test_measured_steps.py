"""An engine that measures its steps at start, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tlt_server.commands import SetPolicy
from tlt_server.demo.workload import DRAFTER, TARGET
from tlt_server.engine.assembly import assemble
from tlt_server.engine.knowledge_file import NAME
from tlt_server.engine.settings import EngineSettings
from tlt_server.speculation.cost import StepLoad


def test_steps_are_measured_at_the_first_start_and_known_at_the_next(tmp_path: Path) -> None:
    details = []
    for _ in range(2):
        phases: dict[str, str] = {}
        engine, _ = assemble(
            EngineSettings(
                model=TARGET,
                drafter=str(DRAFTER),
                device="cpu",
                kv_memory_mb=64,
                max_running=8,
                policy="goodput",
                state_dir=str(tmp_path),
            ),
            lambda name, seconds, detail, phases=phases: phases.update({name: detail}),
        )
        details.append(phases["measure steps"])
        assert engine.knowledge.cost.trained and engine.idle and not engine.scheduler.holds_kv
        assert all(known.ratio == 1.0 for known in engine.knowledge.outlooks.values())
    assert details[0].endswith(" steps") and details[1] == f"known from {tmp_path / NAME}"


def test_steps_are_measured_once_a_policy_needs_it(tmp_path: Path) -> None:
    engine, _ = assemble(
        EngineSettings(
            model=TARGET,
            drafter=str(DRAFTER),
            device="cpu",
            kv_memory_mb=64,
            max_running=8,
            policy="off",
            state_dir=str(tmp_path),
        )
    )
    assert not engine.use_idle_time() and not engine.knowledge.cost.trained
    engine.knowledge.cost.observe(StepLoad("", 0, 0, 1, 1, 0, 8.0), 1e-3)
    engine.knowledge_file.save(engine.knowledge)
    assert not (tmp_path / NAME).exists(), "a later start would measure nothing"
    engine.send(SetPolicy("goodput"))
    engine.step()
    while engine.use_idle_time():
        assert engine.idle and not engine.scheduler.holds_kv
    assert engine.knowledge.cost.trained and not engine.use_idle_time()
    assert {*engine.knowledge.cost.record().draft} == {"eagle", "history"}
    assert (tmp_path / NAME).exists()


@pytest.mark.parametrize("longest", [2, 64])
def test_an_engine_of_short_sequences_measures_its_steps_too(longest: int) -> None:
    engine, info = assemble(
        EngineSettings(
            model=TARGET,
            drafter=str(DRAFTER),
            device="cpu",
            kv_memory_mb=64,
            max_running=8,
            max_model_len=longest,
            policy="goodput",
        )
    )
    assert info.max_model_len == longest
    assert engine.idle
    assert engine.knowledge.cost.profiled == (longest > 2)  # of 2 tokens none is decoded
