"""A rank whose device fails, at orders of each stage: one error, soon, and the rank has ended."""

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
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import EngineFailed
from tlt_server.wire.commands import Sleep, WakeUp

__all__ = ["root", "settings"]  # fixtures

ORDERS = {
    "loading": ("LoadShard", "CheckNumerics", "Allocate", "ExtendRows"),
    "serving": ("ExtendRows", "LoadShard", "Install", "Save", "FreePages"),
    "waking": ("ReclaimPages", "Restore"),
}
CASES = [f"{stage} {order}" for stage, orders in ORDERS.items() for order in orders]


@pytest.mark.parametrize("case", mostly_long(CASES, "serving ExtendRows"))
def test_device_failure_at_an_order_is_one_error(
    settings: EngineSettings, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    failing, begun = case.split()[0], tmp_path / "begun"
    monkeypatch.setenv("FAILING_ORDER", case.split()[1])
    monkeypatch.setenv("FAILING_FROM", str(begun))
    run_rank_of_tests(monkeypatch, "failing_rank")
    entered: list[str] = []

    def enter(stage: str) -> None:
        entered.append(stage)
        if stage == failing:
            begun.touch()

    with pytest.raises(EngineFailed, match=r"rank 1 \(process \d+\) ended with status 1"):
        enter("loading")
        engine = Pushable(replace(settings, tensor_parallel=2, state_dir=tmp_path / "state"))
        enter("serving")
        engine.submit(*requests(2))
        engine.step()
        assert engine.push(root / "new", "v1").result == "committed"
        send(engine, Sleep("s", ("kv_cache",)))
        enter("waking")
        send(engine, WakeUp("w", ("kv_cache",)))
        engine.finish()
    assert entered[-1] == failing
    assert time.monotonic() - float(begun.read_text()) < 10
