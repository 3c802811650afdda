"""An engine that measures its steps at start, once."""

from __future__ import annotations

from pathlib import Path

from tlt_server.demo.workload import DRAFTER, TARGET
from tlt_server.engine.assembly import assemble
from tlt_server.engine.knowledge_file import NAME
from tlt_server.engine.settings import EngineSettings


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
