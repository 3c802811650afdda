"""The spot trainer: decides between two segments whether to train, evaluate, park or wait, executes
orders and reports. No torch; the work is a `Work`, created from the first weights that the engine
hands over.

Faults stay in here: after a step that ran out of memory, training is retried once with half a
micro-batch, then paused with the reason. If a drafter cannot be trained, the trainer has failed
until weights change. Nothing depends on any of this, as tokens are the target's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator
from typing import NamedTuple, Protocol

import msgspec

from tlt_server.errors import StartupError, TltError
from tlt_server.samples.sample import Sample
from tlt_server.trainer.process.gathering import FeatureGathering, NeedsFeatures
from tlt_server.trainer.process.schedule import Schedule
from tlt_server.trainer.process.states import StateMachine
from tlt_server.wire.training import (
    NO_DATA,
    Facts,
    FromTrainer,
    HandedOver,
    InForce,
    Judged,
    Offer,
    Order,
    SpotReport,
    ToTrainer,
    TrainerState,
    Verdict,
    WeightsWanted,
)

ANSWER_S = 120.0  # time after which weights that were asked for are asked for again
REPORT_S = 1.0
RETRY_S = 10.0  # time after which weights that were refused are asked for again
HELD = "it is paused for a time"


class RoundEnd(NamedTuple):
    """The end of a round: a candidate to adopt, the reason why there is none, or no trial."""

    refused: str = ""
    judged: Judged | None = None
    offer: Offer | None = None
    pause: str = ""  # a reason to go no further without an operator
    paid: bool = False  # the next one begins at once


Round = Generator[TrainerState, None, RoundEnd]


class Work(NeedsFeatures, Protocol):
    @property
    def facts(self) -> Facts: ...

    def install(self, handed: HandedOver) -> None:
        """Install the active weights. `TltError` or `StartupError` if they cannot be trained on,
        `MemoryError` if memory is too small.
        """

    def round(self) -> Round:
        """Train on recorded sequences and judge the result, yielding the state after each segment.
        `MemoryError` ends the round.
        """

    def halve(self) -> bool:
        """Halve the micro-batch. Return False if it was halved before."""

    def adopted(self, version: str) -> None:
        """Note that the last candidate is active under this version. `MemoryError` if memory is too
        small to load it.
        """

    def release(self) -> None:
        """Free memory that a later `round` allocates again."""


class SpotTrainer:
    def __init__(
        self,
        work: Callable[[str], Work],
        send: Callable[[FromTrainer], None],
        clock: Callable[[], float] = time.monotonic,
        schedule: Schedule | None = None,
    ) -> None:
        """`work`: creates the work on a device, once weights are handed over."""
        self.phases, self.schedule = StateMachine(clock), schedule or Schedule()
        self._make, self._send, self._clock = work, send, clock
        self._made: Work | None = None
        self._live: InForce | None = None
        self._handed: InForce | None = None  # the versions that `work` has
        self._asked_s: float | None = None  # when weights were asked for
        self._gathering = FeatureGathering(send, clock)
        self._round: Round | None = None
        self._offered: Offer | None = None
        self._judged: Judged | None = None
        self._refused: Counter[str] = Counter()
        self._adopted = self._answered = self._slept = 0
        self._parking_ms: list[float] = []
        self._reported: SpotReport | None = None
        self._report_s = clock()

    @property
    def state(self) -> TrainerState:
        return self.phases.state

    @property
    def _work(self) -> Work:
        assert self._made is not None, "weights are handed over first"
        return self._made

    @property
    def _held(self) -> bool:
        return self.state == TrainerState.PAUSED and self.phases.reason == HELD

    def took(self, sample: Sample) -> None:
        self.schedule.took(sample)

    # -- messages ----------------------------------------------------------------------------------

    def take(self, message: ToTrainer) -> None:
        match message:
            case InForce():
                self._in_force(message)
            case HandedOver():
                self._hand_over(message)
            case Verdict():
                self._settle(message)
            case Order():
                self._obey(message)

    def _in_force(self, live: InForce) -> None:
        before, self._live = self._live, live
        if before in (None, live):
            return
        offered = self._offered is not None and live.drafter == self._offered.version
        if live.target == before.target and offered:
            return  # its verdict follows
        self._abandon("weights_changed")
        self.schedule.renewed()
        if self.state == TrainerState.FAILED:
            self.phases.resume()

    def _hand_over(self, handed: HandedOver) -> None:
        if handed.error:
            if self.state != TrainerState.PAUSED:
                self.phases.reason = handed.error
            self._asked_s = self._clock() - ANSWER_S + RETRY_S
            return
        self._asked_s = self._handed = None
        try:
            self._made = self._made or self._make(handed.device)
            self._work.install(handed)
        except (TltError, StartupError, ValueError, OSError) as error:
            self.phases.enter(TrainerState.FAILED, f"this drafter cannot be trained: {error}")
        except MemoryError as error:
            self._no_room_for_weights(error)
        else:
            self._handed = InForce(handed.target, handed.drafter, handed.quantization)

    def _settle(self, verdict: Verdict) -> None:
        offered, self._offered = self._offered, None
        if offered is None or offered.version != verdict.version:
            return
        assert self._judged is not None
        outcome = verdict.refused or "adopted"
        self._judged = msgspec.structs.replace(self._judged, outcome=outcome)
        self.phases.drop()
        if verdict.refused:
            if self.state != TrainerState.PAUSED:
                self.phases.reason = verdict.error
            self._refused[verdict.refused] += 1
            return
        self._adopted += 1
        self.schedule.judged(gain=True)
        handed, self._handed = self._handed, None
        try:
            self._work.adopted(verdict.version)
        except MemoryError as error:
            self._no_room_for_weights(error)
        else:
            how = handed.quantization if handed else "none"
            self._handed = InForce(offered.target_version, verdict.version, how)

    def _obey(self, order: Order) -> None:
        self._answered = order.number
        match order.do:
            case "train":
                self.schedule.order()
            case "pause":
                self.phases.pause("an operator has paused it")
            case "resume":
                self.phases.resume()
            case "hold":
                if self.state not in (TrainerState.PAUSED, TrainerState.FAILED):
                    self.phases.pause(HELD)
            case "release":
                if self._held:
                    self.phases.resume()
        self._report_s = self._clock()  # reports at once

    # -- work --------------------------------------------------------------------------------------

    def advance(self, *, busy: bool, busy_ms: float = 0.0, asleep: int = 0) -> bool:
        """Run a segment if one may run. Return False if nothing was done. `busy_ms`: time since the
        engine got work. `asleep`: number of the sleep that needs memory freed; 0: none.
        """
        if not self.phases.may_run(busy=busy):
            if self.state == TrainerState.PARKING:
                self._parking_ms.append(busy_ms)
                self.phases.parked()
            if asleep not in (0, self._slept):
                self._give_back()
                self._slept = asleep
            return False
        if self._round is None and not self._begin():
            return False
        assert self._round is not None
        try:
            state = next(self._round)
        except StopIteration as end:
            self._end(end.value)
        except MemoryError as error:
            self._short_of_memory(error)
        except (OSError, TltError) as error:
            self._round = None
            self.phases.pause(f"a round failed ({error}); mend that, then POST /drafter/resume")
            self.phases.drop()
        else:
            if state != self.state:
                self.phases.enter(state)
        return True

    def _begin(self) -> bool:
        """Start a round, if one is due and the active weights are loaded."""
        if self._live is None or self._offered is not None or not self.schedule.due:
            return False
        if self._handed != self._live:
            if self._asked_s is None or self._clock() - self._asked_s > ANSWER_S:
                self._asked_s = self._clock()
                self._send(WeightsWanted())
            return False
        if not self._gathering.done(self._work):
            return False
        self.schedule.began()
        self._round = self._work.round()
        self.phases.enter(TrainerState.TRAINING)
        return True

    def _end(self, outcome: RoundEnd) -> None:
        self._round = None
        self._judged = outcome.judged or self._judged
        if outcome.offer is not None:
            self._offered = outcome.offer
            self._send(outcome.offer)
            self.phases.enter(TrainerState.ADOPTING)
            return
        self._refused += Counter([outcome.refused] if outcome.refused else [])
        if outcome.refused != NO_DATA:
            self.schedule.judged(gain=outcome.paid)
        if outcome.pause:
            self.phases.pause(outcome.pause)
        self.phases.drop()

    def _give_back(self) -> None:
        self._abandon("asleep")
        self._handed = None
        if self._made is not None:
            self._made.release()
        self._report_s = self._clock()  # reports at once

    def _short_of_memory(self, error: MemoryError) -> None:
        self._round = None
        self._work.release()
        if self._work.halve():
            self.schedule.order()
        else:
            self.phases.pause(
                f"memory ran out with half a micro-batch, too ({error}); give the trainer more, "
                "then POST /drafter/resume"
            )
        self.phases.drop()

    def _no_room_for_weights(self, error: MemoryError) -> None:
        if self._made is not None:
            self._made.release()
        reason = f"memory ran out as the active weights were taken over ({error})"
        self.phases.pause(f"{reason}; give the trainer more, then POST /drafter/resume")

    def _abandon(self, reason: str) -> None:
        """End a round or an offer whose weights are no longer active."""
        self._gathering.begin_again()
        if self._round is not None or self._offered is not None:
            self._refused[reason] += 1
            if self._round is not None:
                self._round.close()
                self.schedule.order()
            if self._offered is not None:
                assert self._judged is not None
                self._judged = msgspec.structs.replace(self._judged, outcome=reason)
            self._round = self._offered = None
        self.phases.drop()

    # -- reports -----------------------------------------------------------------------------------

    def report(self) -> SpotReport | None:
        """Return the report; None if nothing has changed, or too little time has passed."""
        state = self.state
        same = self._reported is not None and state == self._reported.state
        if same and self._clock() < self._report_s:
            return None
        facts = self._made.facts if self._made is not None else Facts()
        report = SpotReport(
            state=state,
            reason=self.phases.reason,
            held=self._held,
            answered=self._answered,
            slept=self._slept,
            trained_on=self._handed.target if self._handed else "",
            interval_tokens=self.schedule.interval,
            recorded_tokens=self.schedule.recorded,
            quiet_s=self.phases.quiet_s,
            candidate=self._judged,
            adopted=self._adopted,
            refused=dict(self._refused),
            parkings=self.phases.parkings,
            **msgspec.structs.asdict(facts),
        )
        self._report_s = self._clock() + REPORT_S
        if report == self._reported and not self._parking_ms:
            return None
        self._reported = report
        taken, self._parking_ms = self._parking_ms, []
        return msgspec.structs.replace(report, parking_ms=taken)
