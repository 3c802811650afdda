"""A rank whose device fails, at each of the orders that it can be given: one error, no process is
left, and nothing waits.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.halting import send
from tests.engine.pushing import Pushable
from tests.engine.ranks_of_tests import run_rank_of_tests
from tests.engine.test_engine import requests
from tests.engine.test_ranks import root, settings
from tests.mostly_long import mostly_long
from tlt_server.commands import Sleep, WakeUp
from tlt_server.engine.ranks import Ranks
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import EngineFailed

__all__ = ["root", "settings"]  # fixtures

LOADING = ("LoadShard 1", "CheckNumerics 1", "Install 1", "Allocate 1")
SERVING = ("ExtendRows 3", "LoadShard 2", "Install 2", "Save 1", "FreePages 1")
WAKING = ("ReclaimPages 1", "Restore 1")


@pytest.mark.parametrize("order", mostly_long((*LOADING, *SERVING, *WAKING), "Install 2"))
def test_a_device_that_fails_at_an_order_is_one_error(
    settings: EngineSettings,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    order: str,
) -> None:
    launched: list[Ranks] = []
    launch = Ranks._launch

    def noted(ranks: Ranks, *given: object) -> None:
        launched.append(ranks)
        launch(ranks, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Ranks, "_launch", noted)
    monkeypatch.setenv("FAILING_ORDER", order)
    run_rank_of_tests(monkeypatch, "failing_rank")
    with pytest.raises(EngineFailed, match=r"rank 1 \(process \d+\) ended with status 1"):
        engine = Pushable(replace(settings, tensor_parallel=2, state_dir=tmp_path))
        assert order not in LOADING, "it was to fail before"
        engine.submit(*requests(2))
        engine.step()
        assert engine.push(root / "new", "v1").result == "committed"
        send(engine, Sleep("s", ("kv_cache",)))
        assert order in WAKING, "it was to fail before"
        send(engine, WakeUp("w", ("kv_cache",)))
        engine.finish()
    failed_s = time.monotonic()
    [ranks] = launched
    ranks.close()
    assert all(process.returncode == 1 for process in ranks._processes)
    assert time.monotonic() - failed_s < 5
