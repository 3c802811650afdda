"""The coordinator's decisions over simulated servers: who trains, when training is taken back, and
which drafter every server ends with.
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


class Fleet:
    """Servers that do what they are asked."""

    def __init__(self, count: int, **options: float) -> None:
        self.coordination = Coordination(**options)  # type: ignore[arg-type]
        self.servers = {url: Seen(url, 0, "idle", 0, "t0", "d0") for url in "abcdefgh"[:count]}
        self.now_s = 0.0

    def set(self, url: str, **fields: object) -> None:
        self.servers[url] = self.servers[url]._replace(**fields)  # type: ignore[arg-type]

    def step(self, seconds: float = 10.0) -> list[Action]:
        self.now_s += seconds
        actions = self.coordination.decide([*self.servers.values()], self.now_s)
        for action in actions:
            if isinstance(action, LetTrain):
                self.set(action.url, trainer="training", held=False)
            elif isinstance(action, StopTraining):
                self.set(action.url, trainer="paused", held=True)
                self.coordination.stopped(action.url)
            elif isinstance(action, ShareDrafter):
                assert action.version == self.servers[action.source].drafter
                self.set(action.url, drafter=action.version)
        return [a for a in actions if not (isinstance(a, StopTraining) and a.again)]

    @classmethod
    def begun(cls, count: int, **options: float) -> Fleet:
        """Servers of which one has begun to train, if one may."""
        fleet = cls(count, **options)
        for _ in range(2):
            fleet.step()
        return fleet

    def shares(self) -> list[Action]:
        return [action for action in self.step() if isinstance(action, ShareDrafter)]

    def adopts(self, url: str, version: str) -> None:
        self.set(url, drafter=version, trained=True, rounds=self.servers[url].rounds + 1)

    def training(self) -> list[str]:
        return [url for url, server in self.servers.items() if server.trainer == "training"]


def test_idle_server_trains_is_recalled_and_all_get_its_drafter() -> None:
    fleet = Fleet(4)
    for url in "abd":
        fleet.set(url, load=3)
    fleet.step()
    actions = fleet.step()
    assert fleet.training() == ["c"] and LetTrain("c") in actions
    assert fleet.step() == [GiveSamples("c")]
    fleet.adopts("c", "d1")
    assert fleet.shares() == [ShareDrafter(url, "c", "d1") for url in "abd"]
    assert fleet.coordination.done([*fleet.servers.values()])
    fleet.set("c", load=2)
    assert fleet.step() == [StopTraining("c", "2 sequences are open")]
    assert {server.drafter for server in fleet.servers.values()} == {"d1"}
    assert fleet.step() == []


def test_second_coordinator_undoing_a_command_is_noticed() -> None:
    fleet = Fleet.begun(3)
    [mine], [other, _] = fleet.training(), [url for url in "abc" if url not in fleet.training()]
    assert not fleet.coordination.rivals
    fleet.set(other, trainer="training", held=False)
    fleet.step()
    assert fleet.coordination.rivals == {other}
    fleet.set(mine, trainer="paused", held=True)
    fleet.step()
    assert fleet.coordination.rivals == {mine}


def test_own_pause_ended_while_away_is_recognised() -> None:
    fleet = Fleet.begun(3)
    other = next(url for url in "abc" if url not in fleet.training())
    away = fleet.servers.pop(other)
    fleet.step()
    fleet.servers[other] = away._replace(trainer="training", held=False)
    fleet.step()
    assert not fleet.coordination.rivals
    fleet.set(other, trainer="training", held=False)
    seen = [*fleet.servers.values()]
    fleet.coordination.decide(seen, fleet.now_s, {other})  # it was slow to answer
    fleet.coordination.decide(seen, fleet.now_s)
    assert not fleet.coordination.rivals


def test_server_must_be_idle_for_a_time_before_it_trains() -> None:
    fleet = Fleet(1, quiet_s=5.0)
    fleet.step(0.0)
    assert fleet.step(4.9) == [] and fleet.training() == []
    fleet.set("a", load=1)
    fleet.step(1.0)
    fleet.set("a", load=0)
    fleet.step(1.0)
    assert not fleet.training()
    fleet.step(5.0)
    assert fleet.training() == ["a"]


def test_training_stops_when_too_few_other_servers_are_idle() -> None:
    fleet = Fleet.begun(3, min_idle=2)
    assert len(fleet.training()) == 1
    [training] = fleet.training()
    fleet.set("c" if training != "c" else "a", load=1)
    [pause] = [action for action in fleet.step() if isinstance(action, StopTraining)]
    assert pause == StopTraining(training, "1 others are idle, and --min-idle is 2")
    assert fleet.step() == []


def test_adoption_is_not_interrupted() -> None:
    fleet = Fleet.begun(2)
    fleet.set("a", trainer="adopting", load=1)
    assert fleet.step() == [GiveSamples("a")]
    fleet.set("a", trainer="training")
    fleet.adopts("a", "d1")
    assert fleet.step()[0] == StopTraining("a", "1 sequences are open")
    assert fleet.servers["b"].drafter == "d1"


def test_returning_server_gets_the_shared_drafter() -> None:
    fleet = Fleet.begun(2)
    fleet.adopts("a", "d1")
    gone = fleet.servers.pop("b")
    fleet.step()
    fleet.servers["b"] = gone
    assert ShareDrafter("b", "a", "d1") in fleet.step()
    fleet.set("b", drafter="d0")  # it has restarted
    assert ShareDrafter("b", "a", "d1") in fleet.step()


def test_drafter_is_not_shared_with_a_different_target() -> None:
    fleet = Fleet.begun(3)
    [training] = fleet.training()
    fleet.adopts(training, "d1")
    other = "b" if training != "b" else "c"
    fleet.set(other, target="t1")
    fleet.step()
    assert fleet.servers[other].drafter == "d0"
    for url in fleet.servers:
        fleet.set(url, target="t1", drafter=f"with {url}")
    assert not fleet.shares()


def test_drafter_pushed_with_a_target_does_not_count_as_adoption() -> None:
    fleet = Fleet.begun(2)
    fleet.set("a", target="t1", drafter="pushed")
    fleet.set("b", target="t1")
    assert fleet.step() == [GiveSamples("a")]


def test_refusing_server_is_asked_a_bounded_number_of_times() -> None:
    coordination = Coordination()
    servers = [Seen("a", 0, "idle", 0, "t0", "d0"), Seen("b", 0, "", 0, "t0", "d0")]
    coordination.decide(servers, 0.0)
    coordination.decide(servers, 9.0)
    servers[0] = servers[0]._replace(drafter="d1", trainer="training", rounds=1, trained=True)
    for _ in range(MAX_REFUSALS):
        assert not coordination.done(servers) or coordination.shared is None
        [share] = [a for a in coordination.decide(servers, 9.0) if isinstance(a, ShareDrafter)]
        coordination.refused(share)
    assert not [a for a in coordination.decide(servers, 9.0) if isinstance(a, ShareDrafter)]
    assert coordination.gives_up(share) and coordination.done(servers)


def test_server_refusing_to_train_is_replaced_by_a_second_server() -> None:
    fleet = Fleet.begun(2)
    fleet.coordination.cannot_train("a")
    fleet.set("a", trainer="paused")
    fleet.step()
    assert fleet.training() == ["b"]


def test_restarted_training_server_gets_the_shared_drafter() -> None:
    fleet = Fleet.begun(2)
    fleet.adopts("a", "d1")
    fleet.step()
    fleet.set("a", drafter="d0", trained=False, rounds=0, trainer="idle")
    assert ShareDrafter("a", "b", "d1") in fleet.step()
    assert {server.drafter for server in fleet.servers.values()} == {"d1"}


def test_server_without_data_is_asked_again() -> None:
    fleet = Fleet(1)
    fleet.step()
    assert fleet.step() == [LetTrain("a")]
    fleet.set("a", trainer="idle")
    assert fleet.step() == [LetTrain("a", again=True)]
    fleet.adopts("a", "d1")
    fleet.set("a", trainer="idle")
    assert fleet.step() == [GiveSamples("a")]


def test_training_moves_to_an_idle_server_and_defers_failed_ones() -> None:
    fleet = Fleet.begun(3, min_idle=1)
    assert fleet.training() == ["a"]
    fleet.set("a", load=2)
    assert fleet.step()[0] == StopTraining("a", "2 sequences are open")
    assert fleet.training() == ["b"] and fleet.servers["a"].held
    fleet.coordination.put_off("b")
    fleet.set("b", trainer="idle")
    fleet.set("a", load=0)
    fleet.step()
    assert fleet.training() == ["c"]
    fleet.set("b", load=1)
    fleet.set("a", load=1)
    assert StopTraining("c", "0 others are idle, and --min-idle is 1") in fleet.step()
    assert fleet.training() == []


@pytest.mark.parametrize("state", ["", "failed"])
def test_server_unable_to_train_gets_no_command(state: str) -> None:
    fleet = Fleet(1)
    fleet.set("a", trainer=state)
    for _ in range(3):
        assert fleet.step() == []


def test_at_most_one_server_trains_and_only_an_idle_one() -> None:
    rng = random.Random(5)
    for min_idle in (0, 1, 3):
        fleet, adopted = Fleet(6, min_idle=min_idle), 0
        for _ in range(400):
            for url in fleet.servers:
                if rng.random() < 0.2:
                    fleet.set(url, load=rng.choice((0, 0, 3)))
            for url in fleet.training():
                if rng.random() < 0.3:
                    adopted += 1
                    fleet.adopts(url, f"d{adopted}")
            fleet.step(rng.choice((1.0, 7.0)))
            training = fleet.training()
            assert len(training) <= 1
            idle = {url for url, server in fleet.servers.items() if not server.load}
            assert all(url in idle and len(idle) > min_idle for url in training)
        assert adopted
        assert {server.drafter for server in fleet.servers.values()} == {f"d{adopted}"}
