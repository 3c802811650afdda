"""The spot trainer with made-up work and a simulated clock: when it runs, parks and gives up."""

from __future__ import annotations

import pytest

from tests.unit.recorded_samples import sample
from tlt_server.errors import ModelError
from tlt_server.trainer.process.gathering import LITTLE_PATIENCE_S, PATIENCE_S, Lacking
from tlt_server.trainer.process.schedule import Schedule, TrialSpacing
from tlt_server.trainer.process.spot import ANSWER_S, RETRY_S, Round, RoundEnd, SpotTrainer
from tlt_server.trainer.process.states import (
    LEAST_QUIET_S,
    MOST_QUIET_S,
    NEXT,
    StateMachine,
    quiet_after,
)
from tlt_server.wire.commands import Recompute
from tlt_server.wire.training import (
    Do,
    Facts,
    FromTrainer,
    HandedOver,
    InForce,
    Judged,
    Offer,
    Order,
    SpotReport,
    TrainerState,
    Verdict,
    WeightsWanted,
    line_of,
    read_from_trainer,
    read_to_trainer,
)

S = TrainerState
LIVE = InForce("v1", "d1")
OFFER = Offer(directory="/c", version="drafter-v1-1", target_version="v1")


def judged(outcome: str) -> Judged:
    return Judged(candidate=1, target_version="v1", drafter_version="d1", outcome=outcome)


class FakeWork:
    """Rounds of two segments of training and one of evaluation."""

    def __init__(self) -> None:
        self.facts = Facts()
        self.outcome = RoundEnd(offer=OFFER, judged=judged("offered"))
        self.segments = 0
        self.closed = self.halved = self.released = 0
        self.fault: Exception | None = None
        self.refuses = self.full = False
        self.adoptions: list[str] = []
        self.without = 0  # sequences that have no features
        self.some = False  # are there others that have some?

    def install(self, handed: HandedOver) -> None:
        if self.refuses:
            raise ModelError("'norm_before_residual' is true")
        if self.full:
            raise MemoryError("1 GiB")

    def lacking(self) -> Lacking:
        return Lacking(self.without, Recompute([b"four"] * min(2, self.without)))

    def ready(self) -> bool:
        return self.some

    def round(self) -> Round:
        try:
            for state in (S.TRAINING, S.TRAINING, S.EVALUATING):
                self.segments += 1
                if self.fault is not None and self.segments % 3 == 2:
                    raise self.fault
                yield state
        except GeneratorExit:
            self.closed += 1
            raise
        return self.outcome

    def halve(self) -> bool:
        self.halved += 1
        return self.halved == 1

    def adopted(self, version: str) -> None:
        if self.full:
            raise MemoryError("1 GiB")
        self.adoptions.append(version)

    def release(self) -> None:
        self.released += 1


class Rig:
    """A trainer of these weights after some turns."""

    def __init__(self, turns: int = 0) -> None:
        self.now, self.work = 0.0, FakeWork()
        self.sent: list[FromTrainer] = []
        self.spot = SpotTrainer(lambda device: self.work, self.sent.append, lambda: self.now)
        self._orders = 0
        self.order("train")
        if turns:
            self.hand_over()
            self.run(turns)

    @property
    def report(self) -> SpotReport:
        """The next report, which has something new to say."""
        report = self.spot.report()
        assert report is not None
        return report

    def order(self, *orders: Do) -> None:
        for do in orders:
            self._orders += 1
            self.spot.take(Order(number=self._orders, do=do))

    def verdict(self, **fields: str) -> None:
        """Answer the offer."""
        self.spot.take(Verdict(version=OFFER.version, **fields))

    def run(self, turns: int = 1, *, busy: bool = False) -> None:
        """Look this often, half a second apart."""
        for _ in range(turns):
            self.now += 0.5
            self.spot.advance(busy=busy, busy_ms=3.0 if busy else 0.0)

    def hand_over(self, live: InForce = LIVE) -> None:
        self.spot.take(live)
        self.spot.take(HandedOver(directory="/w", target=live.target, drafter=live.drafter))


def test_round_ends_with_an_adopted_drafter() -> None:
    rig = Rig()
    rig.spot.take(LIVE)
    rig.run(3)
    assert rig.sent == [WeightsWanted()] and rig.spot.state == S.IDLE
    rig.hand_over()
    rig.run(2)
    assert rig.spot.state == S.TRAINING
    rig.run()
    assert rig.spot.state == S.EVALUATING
    rig.run()
    assert rig.sent[1:] == [OFFER] and rig.spot.state == S.ADOPTING
    rig.run(3)  # nothing happens until the verdict
    assert rig.work.segments == 3
    rig.spot.take(InForce("v1", OFFER.version))  # its own push is no change to start afresh for
    rig.verdict()
    assert rig.spot.state == S.IDLE and rig.work.adoptions == [OFFER.version]
    report = rig.report
    assert report.adopted == 1 and not report.refused
    assert report.candidate is not None and report.candidate.outcome == "adopted"
    rig.run(1)  # it paid, so the next one begins at once
    assert rig.spot.state == S.TRAINING and rig.sent.count(WeightsWanted()) == 1  # it has them


@pytest.mark.parametrize("paid", [True, False])
def test_next_round_begins_at_once_after_an_unproven_candidate(*, paid: bool) -> None:
    rig = Rig()
    rig.work.outcome = RoundEnd("no_gain", judged("no_gain"), paid=paid)
    rig.hand_over()
    rig.run(5)
    assert rig.spot.state == S.IDLE and rig.work.segments == 3
    rig.run(2)
    assert rig.spot.state == (S.TRAINING if paid else S.IDLE)
    assert (rig.work.segments > 3) == paid


def test_new_requests_interrupt_and_keep_a_training_round() -> None:
    rig = Rig(turns=2)
    rig.run(3, busy=True)
    assert rig.spot.state == S.PARKED and rig.work.segments == 1 and not rig.work.closed
    report = rig.report
    assert (report.parkings, report.parking_ms) == (1, [3.0])
    rig.run(2)
    assert rig.spot.state == S.TRAINING and rig.work.segments == 2  # the same round goes on


def test_idle_time_before_training_doubles_after_a_miss() -> None:
    assert quiet_after(1.0, worked_s=0.9) == 2.0 and quiet_after(1.0, worked_s=1.0) == 0.5
    assert quiet_after(MOST_QUIET_S, worked_s=0.1) == MOST_QUIET_S
    assert quiet_after(LEAST_QUIET_S, worked_s=9.0) == LEAST_QUIET_S


def test_no_training_runs_before_the_idle_time_is_over() -> None:
    rig = Rig()
    rig.hand_over()
    rig.run(1, busy=True)
    rig.spot.phases.quiet_s = MOST_QUIET_S
    rig.run(int(2 * MOST_QUIET_S))
    assert rig.work.segments == 0
    rig.run()
    assert rig.work.segments == 1


def test_push_drops_the_round_and_requests_the_new_weights() -> None:
    rig = Rig(turns=3)
    rig.spot.take(InForce("v2", "d1"))
    assert rig.work.closed == 1 and rig.spot.state == S.IDLE
    rig.run(2)
    assert rig.sent == [WeightsWanted()]
    rig.hand_over(InForce("v2", "d1"))
    rig.run()
    assert rig.spot.state == S.TRAINING
    report = rig.report
    assert report.refused == {"weights_changed": 1}
    assert report.trained_on == "v2"


# How a state is come to: turns of a round, and what follows.
WAYS = {
    S.TRAINING: (2, ""),
    S.EVALUATING: (4, ""),
    S.ADOPTING: (5, ""),
    S.PARKED: (2, "busy"),
    S.PAUSED: (2, "pause"),
    S.FAILED: (0, "refuse"),
}


@pytest.mark.parametrize("state", WAYS)
@pytest.mark.parametrize("cause", ["push", "rollback", "sleep"])
def test_training_on_replaced_weights_is_never_adopted(state: TrainerState, cause: str) -> None:
    """The trainer asks for the weights in force before it goes on, after a wake-up, too."""
    rig, (turns, then) = Rig(), WAYS[state]
    rig.work.refuses = then == "refuse"
    rig.hand_over()
    rig.run(turns)
    rig.run(then == "busy", busy=True)
    if then == "pause":
        rig.order("pause")
    assert rig.spot.state == state
    rig.work.refuses, before = False, len(rig.sent)
    if cause == "sleep":
        rig.now += 0.5
        rig.spot.advance(busy=True, asleep=1)
        assert rig.work.released == 1
        live = LIVE
    else:
        live = InForce("v2" if cause == "push" else "v0", "d1")
        rig.spot.take(live)
    if state == S.ADOPTING:  # the engine had taken the offer before it was told
        rig.verdict()
    rig.run(3)
    assert not rig.work.adoptions and OFFER not in rig.sent[before:]
    rig.order("resume", "train")
    rig.run(80)
    assert rig.sent[before:] == [WeightsWanted()], "weights are asked for before anything else"
    rig.hand_over(live)
    rig.run(80)
    report = rig.report
    assert report.trained_on == live.target and rig.sent[-1] == OFFER


def test_verdict_on_a_withdrawn_candidate_is_ignored() -> None:
    rig = Rig(turns=5)
    assert rig.spot.state == S.ADOPTING
    rig.spot.take(InForce("v2", "d1"))
    rig.verdict()
    assert rig.spot.state == S.IDLE and not rig.work.adoptions
    report = rig.report
    assert report.candidate is not None
    assert report.candidate.outcome == "weights_changed"


def test_pause_keeps_its_reason_after_a_candidates_verdict() -> None:
    rig = Rig(turns=5)
    rig.order("pause")
    rig.verdict(refused="paused", error="paused")
    report = rig.report
    assert report.refused == {"paused": 1} and report.state == S.PAUSED
    assert report.reason == "an operator has paused it" and not rig.work.adoptions
    rig.order("resume")
    assert rig.spot.state == S.IDLE


def test_released_hold_changes_no_other_pause() -> None:
    rig = Rig(turns=2)

    def ordered(do: Do) -> tuple[TrainerState, bool]:
        rig.order(do)
        report = rig.report
        return report.state, report.held

    assert ordered("hold") == (S.PAUSED, True)
    segments = rig.work.segments
    rig.run(9)
    assert rig.work.segments == segments
    rig.spot.take(HandedOver(error="the engine is away"))  # says nothing about the pause
    assert ordered("hold") == (S.PAUSED, True)
    assert ordered("release") == (S.PARKED, False)
    assert ordered("pause") == (S.PAUSED, False)
    for do in ("hold", "release"):
        assert ordered(do) == (S.PAUSED, False)
    assert ordered("resume") == (S.PARKED, False)
    rig.work.fault = OSError(28, "No space left on device")
    rig.run(3)
    for do in ("hold", "release"):
        assert ordered(do) == (S.PAUSED, False)
    assert "No space left" in rig.spot.phases.reason


def test_refused_candidate_is_counted_by_reason() -> None:
    rig = Rig(turns=5)
    rig.verdict(refused="conflict", error="another push")
    report = rig.report
    assert report.refused == {"conflict": 1} and report.adopted == 0
    assert report.reason == "another push" and report.state == S.IDLE


def test_memory_shortage_halves_the_micro_batch_once() -> None:
    rig = Rig()
    rig.hand_over()
    rig.work.fault = MemoryError("1 GiB")
    rig.run(3)
    assert (rig.work.halved, rig.work.released, rig.spot.state) == (1, 1, S.IDLE)
    rig.run(3)
    assert rig.work.halved == 2 and rig.spot.state == S.PAUSED
    assert "half a micro-batch" in rig.spot.phases.reason
    segments = rig.work.segments
    rig.run(5)
    assert rig.work.segments == segments
    rig.work.fault = None
    rig.order("resume", "train")
    rig.run(2)
    assert rig.spot.state == S.TRAINING


@pytest.mark.parametrize("adopts", [False, True])
def test_weights_beyond_memory_pause_training_and_are_retried(adopts: bool) -> None:
    rig = Rig()
    if adopts:
        rig.hand_over()
        rig.run(5)
        assert rig.spot.state == S.ADOPTING
    rig.work.full = True
    if adopts:
        rig.spot.take(InForce("v1", OFFER.version))
        rig.verdict()
    else:
        rig.hand_over()
    assert rig.spot.state == S.PAUSED and "memory ran out" in rig.spot.phases.reason
    assert rig.work.released == 1
    rig.run(3)
    assert WeightsWanted() not in rig.sent
    rig.work.full = False
    rig.order("resume", "train")
    rig.run(2)
    assert rig.sent[-1] == WeightsWanted()


def test_full_disk_pauses_training_and_keeps_the_process() -> None:
    rig = Rig()
    rig.hand_over()
    rig.work.fault = OSError(28, "No space left on device")
    rig.run(3)
    assert rig.spot.state == S.PAUSED and "No space left" in rig.spot.phases.reason
    rig.work.fault = None
    rig.order("resume", "train")
    rig.run(2)
    assert rig.spot.state == S.TRAINING


def test_untrainable_drafter_fails_until_weights_change() -> None:
    rig = Rig()
    rig.work.refuses = True
    rig.hand_over()
    rig.run(3)
    assert rig.spot.state == S.FAILED and "norm_before_residual" in rig.spot.phases.reason
    rig.work.refuses = False
    rig.hand_over(InForce("v1", "d2"))
    rig.run(1)
    assert rig.spot.state == S.TRAINING


def test_operator_may_retry_an_untrainable_drafter() -> None:
    rig = Rig()
    rig.work.refuses = True
    rig.hand_over()
    rig.order("resume")
    rig.run(2)
    assert rig.spot.state == S.IDLE and rig.sent == [WeightsWanted()] and not rig.work.segments


def test_next_round_waits_for_the_last_candidates_verdict() -> None:
    rig = Rig(turns=5)
    rig.order("pause", "resume", "train")
    rig.run(3)
    assert rig.spot.state == S.IDLE and rig.work.segments == 3
    rig.spot.take(InForce("v1", OFFER.version))
    rig.verdict()
    rig.run(1)
    assert rig.work.adoptions and rig.spot.state == S.TRAINING


def test_pause_keeps_a_partly_done_round() -> None:
    rig = Rig(turns=2)
    rig.order("pause")
    rig.run(9)
    assert rig.spot.state == S.PAUSED and rig.work.segments == 1
    rig.order("resume")
    assert rig.spot.state == S.PARKED
    rig.run(2)
    assert rig.spot.state == S.EVALUATING and rig.work.segments == 3


def test_sleep_frees_memory_and_waking_requests_weights_again() -> None:
    rig = Rig(turns=2)
    assert rig.spot.report() is not None
    for _ in range(2):
        rig.spot.advance(busy=True, asleep=1)
    assert rig.work.released == 1 and rig.work.closed == 1 and rig.spot.state == S.IDLE
    report = rig.report
    assert report.slept == 1
    rig.run(3)
    assert rig.sent == [WeightsWanted()]


def test_missing_weights_are_requested_again() -> None:
    rig = Rig()
    rig.spot.take(LIVE)
    rig.run(2)
    rig.spot.take(HandedOver(error="the weights sleep"))
    rig.run(1)
    assert rig.sent == [WeightsWanted()] and rig.spot.phases.reason == "the weights sleep"
    rig.now += RETRY_S
    rig.run(1)
    assert rig.sent == [WeightsWanted()] * 2
    rig.now += ANSWER_S
    rig.run(1)
    assert rig.sent == [WeightsWanted()] * 3


def test_features_are_computed_on_arrival_before_a_round() -> None:
    rig = Rig()
    rig.work.without = 5
    rig.hand_over()
    rig.run(2)
    assert rig.sent == [Recompute([b"four"] * 2)] and rig.spot.state == S.IDLE
    rig.work.without, rig.work.some = 3, True  # both came: the next ones at once
    rig.run(1)
    assert len(rig.sent) == 2 and rig.spot.state == S.IDLE
    rig.now += LITTLE_PATIENCE_S - 1
    rig.work.without = 2  # one of two, so there is time for the other
    rig.run(1)
    rig.now += LITTLE_PATIENCE_S - 1
    rig.run(1)
    assert len(rig.sent) == 2 and rig.spot.state == S.IDLE
    rig.run(1)  # it does not come: ask once more
    assert len(rig.sent) == 3 and rig.spot.state == S.IDLE
    rig.now += LITTLE_PATIENCE_S
    rig.run(1)  # the engine has work: begin with what there is
    assert len(rig.sent) == 3 and rig.spot.state == S.TRAINING


@pytest.mark.parametrize("captured", [True, False])
def test_a_round_waits_long_only_without_any_features(*, captured: bool) -> None:
    rig = Rig()
    rig.work.without = 5
    rig.hand_over()
    rig.run(2)
    rig.now += PATIENCE_S - 2.5
    rig.work.some = captured
    rig.run(1)
    assert (rig.spot.state == S.TRAINING) == captured
    rig.now += 2
    rig.run(1)
    assert rig.spot.state == S.TRAINING


def test_rounds_without_gain_become_rare_until_weights_change() -> None:
    schedule = Schedule(first=100, most=800)
    assert not schedule.due
    for expected in (100, 200, 400, 800, 800):
        schedule.judged(gain=False)
        assert schedule.interval == expected
    schedule.judged(gain=True)
    assert schedule.interval == 100 and schedule.due, "it pays: the next round begins at once"
    schedule.began()
    for _ in range(3):
        schedule.judged(gain=False)
    schedule.renewed()
    assert schedule.interval == 100
    schedule.took(sample(0, output=8))
    assert schedule.recorded == 8
    schedule.order()
    assert schedule.due
    schedule.began()
    assert not schedule.due


def test_a_falling_acceptance_makes_rounds_frequent_again() -> None:
    schedule = Schedule(first=100)
    for number in range(60):
        schedule.took(sample(number, accepted=2, output=9))
    schedule.judged(gain=False)
    schedule.judged(gain=False)
    assert schedule.interval == 200
    for number in range(9):
        schedule.took(sample(number, accepted=1, output=8))
    assert schedule.interval == 100


def test_trainer_makes_only_known_state_changes() -> None:
    assert set(NEXT) == set(TrainerState)
    phases = StateMachine(lambda: 0.0)
    with pytest.raises(AssertionError, match="idle to adopting"):
        phases.enter(S.ADOPTING)


def test_trainer_messages_survive_encoding() -> None:
    for message in (OFFER, WeightsWanted()):
        assert read_from_trainer(line_of(message)) == message
    for order in (LIVE, Order(number=1, do="pause"), Verdict(version="v", refused="x")):
        assert read_to_trainer(line_of(order)) == order
    with pytest.raises(ValueError):
        read_from_trainer(b"a warning\n")


def test_trials_become_rare_while_candidates_gain() -> None:
    spacing = TrialSpacing()
    assert spacing.left == 24
    for _ in range(30):
        spacing.trained()
    assert spacing.left == 0
    assert spacing.judged(0.1), "not proven, but better than the drafter in force"
    assert spacing.left == 48
    assert spacing.judged(0.3) and spacing.left == 96
    assert not spacing.judged(0.305), "hardly better than the candidate before"
    assert spacing.left == 24
    for _ in range(9):
        spacing.renewed()
        assert spacing.judged(0.5)
    assert spacing.left == 192


def test_training_continues_after_a_round_without_a_trial() -> None:
    rig = Rig()
    rig.work.outcome = RoundEnd(paid=True)
    rig.hand_over()
    rig.run(7)
    assert rig.spot.state == S.TRAINING and rig.work.segments > 3
    report = rig.report
    assert not report.refused
