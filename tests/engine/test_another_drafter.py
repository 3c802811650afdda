"""One record in the table is all that a new drafter needs to be loaded, chosen and served, with
weights of its own or without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tests.engine.fast_interpreter import patched_once
from tests.engine.gpu_engine import bits, checkpoints, choose, on_cpu, request
from tests.engine.oracle import Oracle
from tests.engine.pushing import Pushable
from tests.engine.successors import ARCHITECTURE, SuccessorTable, write_successors
from tlt_server.config import load
from tlt_server.engine.settings import EngineSettings
from tlt_server.speculation.drafters import DRAFTERS, Declaration, Half, to_load
from tlt_server.speculation.guard import AcceptanceGuard
from tlt_server.speculation.policies.arms import ladder
from tlt_server.wire.records import GenerateRequest, Strategy

HISTORY_ON_GPU = DRAFTERS["history"].gpu.implementation
RECORD = Declaration(
    Half("tests.engine.oracle:Oracle", ((3, 1, 4),)),
    Half(HISTORY_ON_GPU, ((2, 1, 3),)),
    can_stand_in=True,
)
CHAIN = Strategy("oracle", 3, 1, 4)
WITH_WEIGHTS = Declaration(
    Half(
        "tests.engine.successors:Successors",
        ((3, 1, 4),),
        "tests.engine.successors:SuccessorLoader",
    ),
    Half(HISTORY_ON_GPU, ((2, 1, 3),), "tests.engine.successors:SuccessorLoader"),
    architectures=(ARCHITECTURE,),
)
SUCCESSORS = Strategy("successors", 3, 1, 4)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTERS, "oracle", RECORD)
    monkeypatch.setitem(DRAFTERS, "successors", WITH_WEIGHTS)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSettings]:
    with patched_once():
        yield checkpoints(tmp_path_factory.mktemp("smallest"))


def requests() -> list[GenerateRequest]:
    """Greedy, so that a small model soon repeats itself."""
    return [request(i, 4 + i, max_tokens=12, temperature=0.0) for i in range(2)]


def test_cpu_engine_drafts_with_a_new_drafter(settings: EngineSettings) -> None:
    engine = Pushable(on_cpu(replace(settings, drafter="oracle")))
    assert engine.info.drafter == "oracle"
    engine.run(*requests())
    plain = bits(engine, ["r0", "r1"])
    answers = {request.id: engine.tokens(request.id) for request in requests()}

    Oracle.answers = answers
    engine.said.clear()
    choose(engine, CHAIN)
    engine.run(*requests())
    assert bits(engine, ["r0", "r1"]) == plain
    gauges = engine.engine.gauges()
    assert gauges["oracle_accepted"] == gauges["oracle_proposed"] >= 2 * 8


@pytest.mark.long
def test_gpu_engine_drafts_with_a_new_drafter(settings: EngineSettings) -> None:
    engine = Pushable(replace(settings, drafter="oracle"))
    assert engine.info.drafter == "oracle"
    engine.run(*requests())
    plain = bits(engine, ["r0", "r1"])

    engine.said.clear()
    choose(engine, CHAIN)
    engine.submit(*requests())
    drafted = 0
    while not engine.engine.idle:
        engine.step()
        if cycle := engine.engine.last_cycle:
            drafted += cycle.drafted
    assert bits(engine, ["r0", "r1"]) == plain and drafted


def test_cpu_engine_drafts_with_a_new_drafters_weights(
    settings: EngineSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(DRAFTERS, "oracle")  # it refuses to stand in
    plain = Pushable(on_cpu(replace(settings, drafter="none")))
    plain.run(*requests())
    expected = bits(plain, ["r0", "r1"])
    after = dict[int, int]()
    for item in requests():
        after |= dict(pairwise([*item.token_ids, *plain.tokens(item.id)]))
    table = [after.get(token, 0) for token in range(64)]
    first = write_successors(tmp_path / "zeros", settings.model, [0] * 64)
    pushed = write_successors(tmp_path / "learned", settings.model, table)

    engine = Pushable(on_cpu(replace(settings, drafter=str(first), weight_root=str(tmp_path))))
    assert engine.info.drafter == "history+successors"
    choose(engine, SUCCESSORS)
    engine.run(*requests())
    assert bits(engine, ["r0", "r1"]) == expected
    before = engine.engine.gauges()["successors_accepted"]

    report = engine.push(pushed, "v1", role="drafter")
    assert report.result == "committed", report.error
    engine.said.clear()
    engine.run(*requests())
    assert bits(engine, ["r0", "r1"]) == expected
    assert engine.engine.gauges()["successors_accepted"] >= before + 4


def test_gpu_engine_loads_a_new_drafters_weights(
    settings: EngineSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(DRAFTERS, "oracle")  # it refuses to stand in
    directory = write_successors(tmp_path / "drafter", settings.model, [0] * 64)
    engine = Pushable(replace(settings, drafter=str(directory)))
    drafter = engine.engine.pushes.transaction.versions.live.drafter
    assert drafter is not None and isinstance(drafter.network, SuccessorTable)
    choose(engine, Strategy("successors", 2, 1, 3))
    engine.run(*requests())
    assert {len(engine.tokens(f"r{i}")) for i in range(2)} == {12}


def test_settings_accept_the_new_drafters_name(settings: EngineSettings) -> None:
    flags = {
        "model": settings.model,
        "drafter": "oracle",
        "policy": "fixed",
        "sd_strategy": CHAIN.name,
    }
    assert load(flags).strategy == CHAIN


def test_drafter_table_falls_back_for_an_unknown_architecture() -> None:
    names = to_load("no/known/architecture")
    assert names == ("eagle", "history", "oracle")
    arms = ladder(names).arms
    assert CHAIN in arms
    eagle = next(arm for arm in arms if arm.drafter == "eagle" and arm.rows == 4 + 1)
    guard = AcceptanceGuard([eagle, CHAIN], 0.5)
    guard._watched["eagle"].rests = True
    assert guard.permitted(eagle) == CHAIN
