"""TLT's Bucketed-Epsilon-Greedy bandit (arXiv 2511.16665, section 5), with exploration on an
allowance.

As in the paper: arms are grouped by verify rows and mapped to batch buckets; reward = accepted
length x batch / step time, kept per bucket and arm in a sliding window; with probability epsilon
another arm is tried, else the best one is used. Different here, because on a CPU one cycle of a bad
arm can cost several plain steps: (1) every bucket has several arms, OFF among them; (2) exploration
spends from an account that earns `regret_share` of the bucket's decode time, so its loss is
bounded for all arms (plus one overdraft, and `credit_steps` again when the leader's
rewards change), and an arm is retried the more rarely the worse it was; (3) an arm is tried for a
few cycles, in turns with the leader, and takes the lead only when better than it in those very
cycles by a margin and by the noise of both, so neither a growing context nor a busy machine decides
and the choice does not flap. Only pure decode cycles are rewarded. Nothing latches: OFF and the
others replace each other by the same rule.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tlt_server.records import OFF, Cycle, StepContext, Strategy
from tlt_server.speculation.policies import Setup
from tlt_server.speculation.policies.arms import CPU_ROWS, Rows, affordable
from tlt_server.speculation.policies.rewards import Rewards

RETURN = 3  # cycles within which a drafter that comes back has little to catch up with


@dataclass(frozen=True)
class BegSettings:
    epsilon: float = 0.05  # share of cycles, at most, that retry an arm already measured
    window: int = 96  # cycles of rewards remembered per bucket and arm
    regret_share: float = 0.015  # share of a bucket's decode time that exploration may lose
    # Steps' worth of time that a bucket may lose at once; its account holds at most twice that.
    credit_steps: float = 2.5
    first_cycles: int = 8  # cycles of the leader before anything else is tried in a bucket
    trial_cycles: int = 3  # cycles that a trial lasts at least
    max_trial: int = 16  # cycles after which an undecided trial ends
    recent: int = 24  # newest rewards of the leader that are compared with its window
    margin: float = 0.03  # ratio by which an arm must beat the leader to replace it
    # Share of speculation's rate taken to be lost in cycles without a reward: catching up, mixed
    # steps.
    unseen: float = 0.15
    seed: int = 0  # seeds the generator that decides when to explore, when none is passed in


class Trial:
    """An arm and the leader in turns, until one is surely better."""

    def __init__(self, arm: Strategy, cycles: int) -> None:
        self.arm, self.left = arm, cycles
        self.own, self.leaders = Rewards(cycles), Rewards(cycles)
        self.leads = True

    @property
    def ratio(self) -> float:
        return self.own.rate / self.leaders.rate if self.leaders.rate else 0.0

    @property
    def error(self) -> float:
        """Standard error of `ratio`."""
        if not self.own.rate or not self.leaders.rate:
            return math.inf
        return self.ratio * math.hypot(
            self.own.error / self.own.rate, self.leaders.error / self.leaders.rate
        )


class Bucket:
    """The arms of one range of batch sizes: their rewards, the leader, the trial in progress, the
    exploration account.
    """

    def __init__(self, arms: Sequence[Strategy], settings: BegSettings) -> None:
        self.arms = tuple(arms)
        self.rewards = {arm: Rewards(settings.window) for arm in arms}
        self.ratios: dict[
            Strategy, tuple[float, float]
        ] = {}  # rate over the leader's and its error, as last tried
        self.leader: Strategy | None = None  # None: never visited
        self.trial: Trial | None = None
        self.account_s = -math.inf  # opened once the leader has been measured
        self.cycles = 0  # since the last look for a trial

    def ratio(self, arm: Strategy | None) -> float | None:
        """Measured rate over the leader's."""
        return 1.0 if arm == self.leader else self.ratios[arm][0] if arm in self.ratios else None

    def promote(self, trial: Trial) -> None:
        assert self.leader is not None
        arm, ratio = trial.arm, trial.ratio
        self.ratios = {
            other: (value / ratio, error / ratio)
            for other, (value, error) in self.ratios.items()
            if other != arm
        }
        self.ratios[self.leader] = (1 / ratio, trial.error / ratio**2)
        self.rewards[arm].keep_last(len(trial.own))
        self.leader, self.trial = arm, None

    def scale(self, factor: float, *, drafter: str, inside: bool) -> None:
        """Multiply the ratios of the arms inside (or outside) one drafter: what changed one of its
        arms has changed all.
        """
        for other, (value, error) in self.ratios.items():
            if (other.drafter == drafter) == inside:
                self.ratios[other] = (value * factor, error * factor)


class Beg:
    def __init__(
        self,
        arms: Sequence[Strategy],
        settings: BegSettings = BegSettings(),
        rng: random.Random | None = None,
        rows: Rows = CPU_ROWS,
    ) -> None:
        self.settings = settings
        self.rng = rng or random.Random(settings.seed)
        self.starts = [start for start, _ in rows]
        self.buckets = [Bucket(affordable(arms, most), settings) for _, most in rows]
        self._nearest = [
            sorted(range(len(self.buckets)), key=lambda other: abs(other - i))
            for i in range(len(self.buckets))
        ]
        self._cycle = 0
        self._last_used: dict[str, int] = {}  # the cycle that last used a drafter
        self._explored_s = self._lost_s = self._decode_s = 0.0
        self._trials = self._switches = 0
        self._shown = OFF

    @classmethod
    def make(cls, setup: Setup) -> Beg:
        return cls(setup.arms, rows=setup.rows)

    def choose(self, context: StepContext) -> Strategy:
        if not context.decoding or not context.speculable:
            return OFF
        index = self._index(context)
        bucket = self.buckets[index]
        if bucket.leader is None:
            bucket.leader = self._first_leader(index)
        self._shown = bucket.leader
        if context.prefill_rows:
            return bucket.leader
        if bucket.trial is None:
            arm = self._next_trial(index, bucket)
            if arm is None:
                return bucket.leader
            self._trials += 1
            bucket.rewards[arm].keep_last(
                2 * self.settings.trial_cycles
            )  # older ones were for shorter contexts
            bucket.trial = Trial(arm, self.settings.max_trial)
        trial = bucket.trial
        trial.leads = not trial.leads
        if not trial.leads:
            trial.left -= 1
            return trial.arm
        if not trial.left:
            self._conclude(bucket)
        return bucket.leader

    def observe(self, cycle: Cycle) -> None:
        context, arm = cycle.context, cycle.strategy
        self._cycle += 1
        settled = (
            not arm.drafter or self._cycle - self._last_used.get(arm.drafter, -RETURN) < RETURN
        )  # else it paid for the catch-up
        self._last_used[arm.drafter] = self._cycle
        if (
            context.prefill_rows
            or not context.decoding
            or not context.speculable
            or cycle.step_s <= 0
        ):
            return
        bucket = self.buckets[self._index(context)]
        if bucket.leader is None or arm not in bucket.rewards:
            return
        leader = bucket.rewards[bucket.leader]
        self._decode_s += cycle.step_s
        lost_s = 0.0
        if leader.rate and (arm != bucket.leader or not settled):
            lost_s = cycle.step_s - cycle.emitted / leader.rate
            self._explored_s += cycle.step_s
            self._lost_s += lost_s
        if len(leader) >= self.settings.first_cycles:
            step_s = leader.step_s * self.settings.credit_steps
            opened = bucket.account_s if bucket.account_s > -math.inf else step_s
            bucket.account_s = min(
                opened + self.settings.regret_share * cycle.step_s - lost_s, 2 * step_s
            )
        if not settled:
            return
        bucket.rewards[arm].add(cycle.emitted, cycle.step_s)
        trial = bucket.trial
        if arm == bucket.leader:
            if trial:
                trial.leaders.add(cycle.emitted, cycle.step_s)
            change = leader.trim_if_drifted(self.settings.recent)
            if change != 1.0:
                bucket.scale(1 / change, drafter=arm.drafter, inside=False)
                bucket.account_s = max(bucket.account_s, leader.step_s * self.settings.credit_steps)
        elif trial and arm == trial.arm:
            trial.own.add(cycle.emitted, cycle.step_s)
            self._judge(bucket, trial)

    def gauges(self) -> Mapping[str, float]:
        decode_s = self._decode_s or 1.0
        return {
            "beg_leader_rows": float(self._shown.rows),
            "beg_trials": float(self._trials),
            "beg_switches": float(self._switches),
            "beg_explored_share": self._explored_s / decode_s,
            "beg_lost_share": self._lost_s / decode_s,
        }

    def _index(self, context: StepContext) -> int:
        return max(0, bisect_right(self.starts, context.decoding) - 1)

    def _judge(self, bucket: Bucket, trial: Trial) -> None:
        """Promote the arm, end its trial, or let it go on."""
        fewest = self.settings.trial_cycles  # one stalled step must not decide
        if len(trial.own) < fewest or len(trial.leaders) < fewest - 1:
            return
        ratio, error, lowest_lead = (
            trial.ratio * self._worth(trial.arm, bucket.leader),
            trial.error,
            1 + self.settings.margin,
        )
        if ratio > lowest_lead and ratio - 1 > 1.5 * error:
            bucket.promote(trial)
            self._switches += 1
        elif ratio + 2 * error < lowest_lead or bucket.account_s < 0:
            self._conclude(bucket)

    def _worth(self, arm: Strategy, leader: Strategy | None) -> float:
        """Return the worth of a measured ratio: speculation must pay for what pure decode cycles do
        not show.
        """
        return ((1.0 - self.settings.unseen) if arm != OFF else 1.0) / (
            (1.0 - self.settings.unseen) if leader != OFF else 1.0
        )

    def _urgent_from(self, arm: Strategy, bucket: Bucket) -> float:
        """The expected ratio from which an arm is tried at once; one never measured gets the
        benefit of the doubt.
        """
        return (
            1 + self.settings.margin
            if arm in bucket.ratios
            else (1 - self.settings.margin) * self._worth(arm, bucket.leader)
        )

    def _conclude(self, bucket: Bucket) -> None:
        """Remember what the trial showed; if it contradicts an earlier one, the arm's drafter has
        changed.
        """
        trial, bucket.trial = bucket.trial, None
        if (
            trial is None
            or bucket.leader is None
            or min(len(trial.own), len(trial.leaders)) < self.settings.trial_cycles - 1
        ):
            return
        ratio, error = trial.ratio, trial.error
        before, doubt = bucket.ratios.get(trial.arm, (ratio, 0.0))
        if (
            abs(ratio - before) > 3 * math.hypot(error, doubt)
            and trial.arm.drafter != bucket.leader.drafter
        ):
            bucket.scale(ratio / before, drafter=trial.arm.drafter, inside=True)
        bucket.ratios[trial.arm] = (ratio, error)

    def _next_trial(self, index: int, bucket: Bucket) -> Strategy | None:
        """Promising unmeasured arms and arms that look better than the leader at once, others with
        probability epsilon; all on account.
        """
        bucket.cycles += 1
        if bucket.account_s < 0 or bucket.cycles < self.settings.trial_cycles:
            return None
        bucket.cycles = 0
        arms = [arm for arm in bucket.arms if arm != bucket.leader]
        assert bucket.leader is not None
        expected = {
            arm: self._expected_ratio(index, arm) * self._worth(arm, bucket.leader) for arm in arms
        }
        limit_s = 2 * self.settings.credit_steps * bucket.rewards[bucket.leader].step_s
        ready = [
            arm
            for arm in arms
            if bucket.account_s >= min(self._cost_s(bucket, arm, expected[arm]), 0.95 * limit_s)
        ]
        urgent = [arm for arm in ready if expected[arm] > self._urgent_from(arm, bucket)]
        if urgent:
            return max(
                urgent, key=lambda arm: expected[arm]
            )  # the first of equals: ladders begin with the least risk
        if ready and self.rng.random() < self.settings.epsilon:
            return max(
                ready,
                key=lambda arm: self.rng.gauss(
                    expected[arm], 2 * bucket.ratios[arm][1] if arm in bucket.ratios else 0.5
                ),
            )
        return None

    def _expected_ratio(self, index: int, arm: Strategy) -> float:
        """Rate over the leader's: measured here; else that of the drafter's nearest measured rung;
        else in the nearest bucket.

        Where OFF leads, a larger batch sets a lower bound only. Of an arm never tried it is 1, but
        where a drafter leads, those of a drafter listed later are no urgent trial: a cold batch is
        short.
        """
        bucket = self.buckets[index]
        assert bucket.leader is not None
        leading, ratio = bucket.rewards[bucket.leader].rate, bucket.ratio(arm)
        if ratio is not None:
            # Without drafts the rate itself stays true, however the leader's acceptance changed.
            return (
                max(ratio, bucket.rewards[OFF].rate / leading) if arm == OFF and leading else ratio
            )
        rungs = [other for other in bucket.ratios if other.drafter == arm.drafter]
        if rungs:
            return bucket.ratios[
                min(rungs, key=lambda other: abs(math.log(other.rows / arm.rows)))
            ][0]
        for other in self._nearest[index]:
            there, leader = self.buckets[other].ratio(arm), self.buckets[other].ratio(bucket.leader)
            if there is not None and leader:
                return (
                    max(1.0, there / leader)
                    if bucket.leader == OFF and other > index
                    else there / leader
                )
        urgent = (
            bucket.leader == OFF
            or bucket.arms.index(arm) < bucket.arms.index(bucket.leader)
            or arm.drafter == bucket.leader.drafter
        )
        return 1.0 if urgent else 1.0 - self.settings.margin

    def _cost_s(self, bucket: Bucket, arm: Strategy, ratio: float) -> float:
        """Time that a shortest trial is expected to lose."""
        assert bucket.leader is not None
        step_s = bucket.rewards[arm].step_s
        if not step_s:  # at worst in proportion to the rows of the nearest measured arm
            measured = [other for other in bucket.arms if len(bucket.rewards[other])]
            near = min(measured, key=lambda other: abs(math.log(other.rows / arm.rows)))
            step_s = bucket.rewards[near].step_s * max(1.0, arm.rows / near.rows)
        return self.settings.trial_cycles * step_s * max(0.0, 1 - ratio)

    def _first_leader(self, index: int) -> Strategy:
        """Return the leader of the next larger batch, since less load never makes speculation
        worse; else OFF.
        """
        for bucket in self.buckets[index + 1 :]:
            if bucket.leader is not None:
                return bucket.leader if bucket.leader in self.buckets[index].rewards else OFF
        return OFF
