"""A pushed drafter whose drafts are never accepted is noticed, rests, and comes back with the next
push; no token depends on it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.engine.pushing import Pushable, perturbed
from tlt_server.demo.workload import DRAFTER, TARGET, problems_as_requests
from tlt_server.engine.settings import EngineSettings
from tlt_server.wire.records import Strategy


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    shutil.copytree(DRAFTER, tmp_path / "good")
    perturbed(DRAFTER, tmp_path / "bad", 1, scale=1.0)
    return EngineSettings(
        model=str(TARGET),
        device="cpu",
        drafter=str(DRAFTER),
        policy="fixed",
        sd_strategy=Strategy("eagle", 2, 1, 3).name,
        kv_memory_mb=256,
        max_model_len=512,
        weight_root=str(tmp_path),
    )


def test_a_drafter_that_fits_no_more_rests_until_the_next_push(
    settings: EngineSettings, tmp_path: Path, capfd
) -> None:
    engine, used = Pushable(settings), []
    requests = problems_as_requests(TARGET, 8, group=2, seed=3, max_tokens=40)

    def answers() -> dict[str, tuple[list[int], list[float]]]:
        used.clear()
        observe = engine.engine.choice.policy.observe
        engine.engine.choice.policy.observe = lambda cycle: (
            used.append(cycle.strategy.drafter),
            observe(cycle),
        )
        try:
            return engine.run(*requests)
        finally:
            engine.engine.choice.policy.observe = observe

    expected = answers()
    assert set(used) <= {"eagle", ""} and "eagle" in used
    assert engine.push(tmp_path / "bad", "bad", role="drafter").result == "committed"
    assert answers() == expected
    assert "eagle" in used and used[-1] == "history", used
    assert engine.engine.gauges()["drafters_resting"] == 1
    assert "first drafts of eagle are accepted for" in capfd.readouterr().err
    assert engine.push(tmp_path / "good", "good", role="drafter").result == "committed"
    assert answers() == expected
    assert set(used) <= {"eagle", ""} and engine.engine.gauges()["drafters_resting"] == 0
