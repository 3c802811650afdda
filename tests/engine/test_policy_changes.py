"""A policy is in force once its kernels are prepared. Until then the one before chooses, steps go
on, and no token changes; a preparation that fails leaves the policy before in force.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.engine.gpu_engine import checkpoints, on_cpu, request
from tests.engine.pushing import Pushable
from tlt_server.errors import Unavailable
from tlt_server.wire.commands import Pause, Resume, SetPolicy, Sleep, WakeUp
from tlt_server.wire.records import OFF, Strategy

TREE = Strategy("eagle", 2, 2, 4)
SET = SetPolicy("fixed", TREE, id="tree")
ASKED = [request(i, length=6, max_tokens=24) for i in range(3)]


class Prepared:
    """A preparation that takes some parts, and may fail in the last one."""

    def __init__(self, parts: int, error: Exception | None = None) -> None:
        self.left, self.error, self.stopped = parts, error, False
        self.stage, self.taken = "under way", "2 kernels were loaded for it"

    def advance(self) -> bool:
        self.left -= 1
        if self.left > 0:
            return False
        if self.error is not None:
            raise self.error
        return True

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Pushable:
    return Pushable(on_cpu(checkpoints(tmp_path_factory.mktemp("smallest"))))


@pytest.fixture(scope="module")
def plain(shared: Pushable) -> dict[str, Any]:
    return shared.run(*ASKED)


@pytest.fixture
def engine(shared: Pushable, plain: dict[str, Any]) -> Iterator[Pushable]:
    shared.said.clear()
    yield shared
    shared.engine.choice.changes._prepare = lambda reach: None
    shared.engine.send(SetPolicy("off"))
    shared.finish()
    shared.step()
    shared.engine.control_reports()


def prepares(engine: Pushable, *preparations: Prepared) -> None:
    """Let the next policies take these preparations."""
    left = iter(preparations)
    engine.engine.choice.changes._prepare = lambda reach: next(left)


def answers(engine: Pushable) -> dict[str, str]:
    """Return the codes of errors, or what is told of a policy in force, by command."""
    reports = engine.engine.control_reports()
    return {each.id: each.error[0] if each.error else each.detail for each in reports}


def used(engine: Pushable) -> Strategy:
    engine.step()
    assert engine.engine.last_cycle is not None, "no step ran"
    return engine.engine.last_cycle.strategy


def test_policy_becomes_active_once_prepared(
    engine: Pushable, plain: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    prepares(engine, Prepared(4))
    engine.submit(*ASKED)
    engine.step(2)
    engine.engine.send(SET)
    assert [used(engine) for _ in range(3)] == [OFF] * 3
    assert engine.engine.choice.changes.stage == "under way" and not answers(engine)
    assert engine.engine.gauges()["policy_preparing"] == 1.0
    assert used(engine) == TREE
    assert engine.engine.gauges()["policy_preparing"] == 0.0
    engine.finish()
    assert {id: (engine.tokens(id), engine.logprobs(id)) for id in engine.said} == plain
    [said] = answers(engine).values()
    assert said.startswith("2 kernels were loaded for it, in ") and "are compiled" in said
    logged = capsys.readouterr().err
    assert "policy fixed with eagle:2x2x4 is being prepared" in logged
    assert f"policy fixed with eagle:2x2x4 is in force: {said}" in logged


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Unavailable("3 of 4 kernels of this policy are not compiled"), "unavailable"),
        pytest.param(KeyError("a bug"), "engine_failed", marks=pytest.mark.contains_faults),
    ],
)
def test_failed_preparation_keeps_the_active_policy(
    error: Exception, code: str, engine: Pushable, plain: dict[str, Any]
) -> None:
    failing = Prepared(2, error)
    prepares(engine, failing)
    before = engine.engine.choice.policy
    engine.submit(*ASKED)
    engine.engine.send(SET)
    assert [used(engine) for _ in range(4)] == [OFF] * 4
    assert engine.engine.choice.policy is before and failing.stopped
    assert answers(engine) == {"tree": code}
    engine.finish()
    assert {id: (engine.tokens(id), engine.logprobs(id)) for id in engine.said} == plain


def test_newer_policy_replaces_one_being_prepared(engine: Pushable) -> None:
    first, second = Prepared(100), Prepared(2)
    prepares(engine, first, second)
    engine.engine.send(SET)
    engine.step()
    engine.engine.send(SetPolicy("fixed", Strategy("history", 3, 1, 4), id="other"))
    engine.engine.send(SetPolicy("no such policy", id="none"))
    engine.step()
    assert first.stopped and answers(engine) == {"tree": "conflict", "none": "startup"}
    engine.submit(ASKED[0])
    engine.step()
    assert "other" in answers(engine) and not second.stopped
    engine.finish()


def test_repeated_policy_waits_for_the_first_preparation(engine: Pushable) -> None:
    only = Prepared(3)
    prepares(engine, only)
    engine.engine.send(SET)
    engine.step()
    engine.engine.send(msgspec.structs.replace(SET, id="again"))
    engine.submit(ASKED[0])
    engine.step(3)
    assert not only.stopped and answers(engine).keys() == {"tree", "again"}


def test_policies_without_missing_kernels_all_succeed(engine: Pushable) -> None:
    engine.engine.send(SET)
    engine.engine.send(SetPolicy("off", id="off"))
    engine.step()
    assert {*answers(engine)} == {"tree", "off"} and engine.engine.choice.changes.stage == ""
    engine.submit(ASKED[0])
    assert used(engine) == OFF
    engine.finish()


def test_sleeping_memory_is_not_used_to_prepare(engine: Pushable) -> None:
    preparation = Prepared(2)
    prepares(engine, preparation)
    engine.engine.send(Sleep("s", ["kv_cache"]))
    engine.engine.send(SET)
    engine.step(5)
    assert preparation.left == 2 and {*answers(engine)} == {"s"}
    engine.engine.send(WakeUp("w", ["kv_cache"]))
    engine.step(3)
    assert {*answers(engine)} == {"w", "tree"}


def test_a_policy_is_prepared_while_generation_is_paused(engine: Pushable) -> None:
    prepares(engine, Prepared(2))
    engine.engine.send(Pause("p"))
    engine.engine.send(SET)
    engine.step(3)
    assert {*answers(engine)} == {"p", "tree"}
    engine.engine.send(Resume("r"))
    engine.submit(ASKED[0])
    engine.step()
    engine.finish()
