"""Branches in the trees of a GPU's drafter, on the interpreter: text that comes again is found, and
no bit changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from tests.engine.fast_interpreter import patched_once
from tests.engine.gpu_engine import bits, checkpoints, drafting, request
from tests.engine.pushing import Pushable
from tlt_server.engine.gpu.memory import budget as memory
from tlt_server.engine.settings import EngineSettings
from tlt_server.wire.commands import ClearCache
from tlt_server.wire.records import DraftLimits, GenerateRequest


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSettings]:
    with patched_once():
        yield replace(checkpoints(tmp_path_factory.mktemp("smallest")), max_running=2)


@pytest.fixture(scope="module")
def engine(settings: EngineSettings) -> Iterator[Pushable]:
    """An engine with two slots for texts that has served two turns, and others between."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "TEXTS", 2 * 4 * 64)
        engine = Pushable(drafting(settings, "eagle", 4, 1, 7))
    engine.run(*again(0))
    for i in (2, 4):
        engine.run(*(request(j, 4, max_tokens=1) for j in (i, i + 1)))
    engine.run(*again(1))
    yield engine


def again(turn: int, max_tokens: int = 12, **fields: object) -> list[GenerateRequest]:
    """Two requests whose prompts and seeds are the same in every turn."""
    asked = [request(i, 6, max_tokens=max_tokens) for i in range(2)]
    return [msgspec.structs.replace(r, id=f"{r.id}/{turn}", **fields) for r in asked]


def accepted(engine: Pushable, turn: int) -> int:
    return sum(out.accepted for r in again(turn) for out in engine.said[r.id])


def branch_nodes(engine: Pushable) -> tuple[int, int]:
    """Return how many nodes of branches were accepted, and how many were tried."""
    table = engine.engine.runner.passes.drafters["eagle"].branches.calibration
    return int(table.hits_Z.sum()), int(table.trials_Z.sum())


def test_branches_from_an_earlier_response_change_no_bit(
    settings: EngineSettings, engine: Pushable
) -> None:
    plain = Pushable(settings)
    plain.run(*again(0))
    expected = bits(plain, [r.id for r in again(0)])
    for turn in range(2):
        found = bits(engine, [r.id for r in again(turn)])
        assert [*found.values()] == [*expected.values()]
    # The network has random weights; 2 x 12 tokens are 24.
    assert accepted(engine, 0) < 11, (accepted(engine, 0), accepted(engine, 1))
    assert accepted(engine, 1) > 13, (accepted(engine, 0), accepted(engine, 1))
    hits, trials = branch_nodes(engine)
    assert 5 < hits <= trials
    assert engine.engine.gauges()["branch_table_drift"] >= 0


def test_no_branches_for_requests_that_exclude_history(engine: Pushable) -> None:
    before = branch_nodes(engine)
    engine.run(*again(2, 5, salt="another"), *again(3, 5, sd=DraftLimits(drafter="eagle")))
    assert branch_nodes(engine) == before
    assert accepted(engine, 2) > 0 and accepted(engine, 3) > 0


def test_earlier_responses_are_forgotten_with_cached_prefixes(engine: Pushable) -> None:
    before = branch_nodes(engine)
    engine.engine.send(ClearCache("c"))
    engine.step()
    assert engine.engine.gauges()["history_pool_tokens"] == 0
    engine.run(*again(4, 5))
    assert branch_nodes(engine) == before
