"""The decisions of a fleet's drafter over simulated replicas: who trains, when training is taken
back, and which drafter every replica ends with.
"""

from __future__ import annotations

import random

import pytest

from tlt_server.drafter.coordination import (
    MAX_REFUSALS,
    Action,
    Coordination,
    GiveSamples,
    LetTrain,
    Seen,
    ShareDrafter,
    StopTraining,
)


class SimulatedReplicas:
    """Replicas that do what they are asked."""

    def __init__(self, count: int, quiet_s: float = 5.0) -> None:
        self.coordination = Coordination(quiet_s)
        self.replicas = {name: Seen(name, 0, "idle", 0, "t0", "d0") for name in "abcdefgh"[:count]}
        self.now_s = 0.0

    def set(self, name: str, **fields: object) -> None:
        self.replicas[name] = self.replicas[name]._replace(**fields)  # type: ignore[arg-type]

    def step(self, seconds: float = 10.0) -> list[Action]:
        self.now_s += seconds
        actions = self.coordination.decide([*self.replicas.values()], self.now_s)
        for action in actions:
            if isinstance(action, LetTrain):
                self.set(action.name, trainer="training", held=False)
            elif isinstance(action, StopTraining):
                self.set(action.name, trainer="paused", held=True)
            elif isinstance(action, ShareDrafter):
                assert action.version == self.replicas[action.name].drafter
                for name, replica in self.replicas.items():
                    if replica.target == action.target:
                        self.set(name, drafter=action.version)
        return [a for a in actions if not (isinstance(a, StopTraining) and a.again)]

    @classmethod
    def begun(cls, count: int) -> SimulatedReplicas:
        """Replicas of which one has begun to train."""
        fleet = cls(count)
        for _ in range(2):
            fleet.step()
        return fleet

    def adopts(self, name: str, version: str) -> None:
        rounds = self.replicas[name].rounds + 1
        self.set(name, drafter=version, trained=True, rounds=rounds)

    def training(self) -> list[str]:
        return [name for name, each in self.replicas.items() if each.trainer == "training"]

    def drafters(self) -> set[str]:
        return {each.drafter for each in self.replicas.values()}


def test_idle_replica_trains_is_recalled_and_all_get_its_drafter() -> None:
    fleet = SimulatedReplicas(4)
    for name in "abd":
        fleet.set(name, load=3)
    fleet.step()
    actions = fleet.step()
    assert fleet.training() == ["c"] and LetTrain("c") in actions
    assert fleet.step() == [GiveSamples("c")]
    fleet.adopts("c", "d1")
    assert fleet.step() == [GiveSamples("c"), ShareDrafter("c", "t0", "d1")]
    assert fleet.drafters() == {"d1"}
    fleet.set("c", load=2)
    assert fleet.step() == [StopTraining("c", "2 sequences are open")]
    assert fleet.step() == []


def test_replica_must_be_idle_for_a_time_before_it_trains() -> None:
    fleet = SimulatedReplicas(1)
    fleet.step(0.0)
    assert fleet.step(4.9) == [] and fleet.training() == []
    fleet.set("a", load=1)
    fleet.step(1.0)
    fleet.set("a", load=0)
    fleet.step(1.0)
    assert not fleet.training()
    fleet.step(5.0)
    assert fleet.training() == ["a"]


def test_drafter_pushed_with_a_target_does_not_count_as_adoption() -> None:
    fleet = SimulatedReplicas.begun(2)
    fleet.set("a", target="t1", drafter="pushed")
    fleet.set("b", target="t1")
    assert fleet.step() == [GiveSamples("a")]


def test_replica_without_data_is_asked_again() -> None:
    fleet = SimulatedReplicas(1)
    fleet.step()
    assert fleet.step() == [LetTrain("a")]
    fleet.set("a", trainer="idle")
    assert fleet.step() == [LetTrain("a", again=True)]
    fleet.adopts("a", "d1")
    fleet.set("a", trainer="idle")
    assert fleet.step() == [GiveSamples("a")]


@pytest.mark.parametrize("state", ["", "failed"])
def test_replica_unable_to_train_gets_no_command(state: str) -> None:
    fleet = SimulatedReplicas(1)
    fleet.set("a", trainer=state)
    for _ in range(3):
        assert fleet.step() == []


def test_adoption_is_not_interrupted() -> None:
    fleet = SimulatedReplicas.begun(2)
    fleet.set("a", trainer="adopting", load=1)
    assert fleet.step() == [GiveSamples("a")]
    fleet.set("a", trainer="training")
    fleet.adopts("a", "d1")
    assert fleet.step()[0] == StopTraining("a", "1 sequences are open")
    assert fleet.replicas["b"].drafter == "d1"


def test_returning_replica_gets_the_shared_drafter() -> None:
    fleet = SimulatedReplicas.begun(2)
    fleet.adopts("a", "d1")
    gone = fleet.replicas.pop("b")
    fleet.step()
    fleet.replicas["b"] = gone
    assert ShareDrafter("a", "t0", "d1") in fleet.step()
    fleet.set("a", drafter="d0", trained=False, rounds=0, trainer="idle")  # it has restarted
    assert ShareDrafter("b", "t0", "d1") in fleet.step()


def test_drafter_that_no_replica_has_is_not_pushed_again() -> None:
    fleet = SimulatedReplicas.begun(3)
    fleet.adopts("a", "d1")
    fleet.step()
    for name in "abc":
        fleet.set(name, drafter="d0")  # an operator has rolled it back
    assert not [action for action in fleet.step() if isinstance(action, ShareDrafter)]
    fleet.step()
    assert fleet.drafters() == {"d0"}


def test_drafter_of_an_earlier_target_is_not_shared() -> None:
    fleet = SimulatedReplicas.begun(3)
    fleet.adopts("a", "d1")
    fleet.set("b", target="t1")
    fleet.step()
    assert fleet.replicas["b"].drafter == "d0" and "b" in fleet.coordination.notes
    for name in "abc":
        fleet.set(name, target="t1", drafter=f"with {name}")
    assert not [action for action in fleet.step() if isinstance(action, ShareDrafter)]


def test_refused_drafter_is_pushed_a_bounded_number_of_times() -> None:
    coordination = Coordination()
    seen = [Seen("a", 0, "idle", 0, "t0", "d0"), Seen("b", 0, "", 0, "t0", "d0")]
    coordination.decide(seen, 0.0)
    coordination.decide(seen, 9.0)
    seen[0] = seen[0]._replace(drafter="d1", trainer="training", rounds=1, trained=True)
    for _ in range(MAX_REFUSALS):
        assert ShareDrafter("a", "t0", "d1") in coordination.decide(seen, 9.0)
        coordination.refused("d1")
    assert coordination.decide(seen, 9.0) == [GiveSamples("a")]


def test_training_moves_to_an_idle_replica_and_defers_failed_ones() -> None:
    fleet = SimulatedReplicas.begun(3)
    assert fleet.training() == ["a"]
    fleet.set("a", load=2)
    assert fleet.step()[0] == StopTraining("a", "2 sequences are open")
    assert fleet.training() == ["b"] and fleet.replicas["a"].held
    fleet.coordination.put_off("b")
    fleet.set("b", trainer="idle")
    fleet.step()
    assert fleet.training() == ["c"]


def test_at_most_one_replica_trains_and_only_an_idle_one() -> None:
    rng = random.Random(5)
    fleet, adopted = SimulatedReplicas(6), 0
    for _ in range(600):
        for name in fleet.replicas:
            if rng.random() < 0.2:
                fleet.set(name, load=rng.choice((0, 0, 3)))
        for name in fleet.training():
            if rng.random() < 0.3:
                adopted += 1
                fleet.adopts(name, f"d{adopted}")
        fleet.step(rng.choice((1.0, 7.0)))
        assert len(fleet.training()) <= 1
        assert all(not fleet.replicas[name].load for name in fleet.training())
    assert adopted and fleet.drafters() == {f"d{adopted}"}
