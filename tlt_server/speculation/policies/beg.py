"""TLT's Bucketed-Epsilon-Greedy bandit (arXiv 2511.16665, section 5), with exploration on an allowance.

As in the paper: arms are grouped by verify rows and mapped to batch buckets; reward = accepted length x batch / step time,
kept per bucket and arm in a sliding window; with probability epsilon another arm is tried, else the best one is used.
Different here, because on a CPU one cycle of a bad arm can cost several plain steps: (1) every bucket has several arms, OFF
among them; (2) exploration spends from an account that earns `regret_share` of the bucket's decode time, so what it loses is
bounded whatever the arms are (plus one overdraft, and `credit_steps` again when the leader's rewards change), and an arm is
retried the more rarely the worse it was; (3) an arm is tried for a few cycles in a row and takes the lead only when better by
a margin and by the noise of both estimates, so the choice does not flap.
Only pure decode cycles are rewarded. Nothing latches: OFF and the others replace each other by the same rule.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tlt_server.records import OFF, Cycle, StepContext, Strategy
from tlt_server.speculation.policies.arms import CPU_ROWS, affordable
from tlt_server.speculation.policies.rewards import Rewards


@dataclass(frozen=True)
class BegSettings:
    epsilon: float = 0.05  # share of cycles, at most, that retry an arm already measured
    window: int = 96  # cycles of rewards remembered per bucket and arm
    buckets: tuple[tuple[int, int], ...] = CPU_ROWS  # (smallest batch in requests, most verify rows per request)
    regret_share: float = 0.015  # share of a bucket's decode time that exploration may lose
    credit_steps: float = 2.5  # steps' worth of time that a bucket may lose at once; its account never holds more than twice that
    first_cycles: int = 8  # cycles of the leader before anything else is tried in a bucket
    trial_cycles: int = 3  # cycles that a trial lasts at least
    longest_trial: int = 12  # cycles after which an undecided trial ends
    recent: int = 24  # newest rewards of the leader that are compared with its window to notice a change
    margin: float = 0.03  # ratio by which an arm must beat the leader to replace it
    seed: int = 0  # of the generator that decides when to explore, when none is passed in


class Bucket:
    """The arms of one range of batch sizes: their rewards, the leader, the trial in progress, the exploration account."""

    def __init__(self, arms: Sequence[Strategy], settings: BegSettings) -> None:
        self.arms, self.fewest = tuple(arms), settings.trial_cycles
        self.rewards = {arm: Rewards(settings.window) for arm in arms}
        self.leader: Strategy | None = None  # None: never visited
        self.trial: Strategy | None = None  # the arm on trial
        self.tried: Strategy | None = None  # whose `trial_rewards` these are; outlives the trial by the cycles still in flight
        self.trial_left = 0
        self.trial_rewards = Rewards(settings.longest_trial)
        self.before = (0.0, math.inf)  # rate and error of the arm before its trial
        self.guessed: set[Strategy] = set()  # arms whose rewards were scaled and not measured since
        self.account_s = -math.inf  # opened once the leader has been measured
        self.cycles = 0  # since the last look for a trial

    def scale_siblings(self, arm: Strategy, factor: float) -> None:
        """What changed one arm of a drafter (acceptance, after a weight push or a new prompt set) has changed the others too."""
        for other, rewards in self.rewards.items():
            if other != arm and arm.drafter and other.drafter == arm.drafter and other not in self.guessed:
                rewards.scale(factor)
                self.guessed.add(other)

    def ratio(self, arm: Strategy) -> float | None:
        """Measured rate over the leader's."""
        leader = self.rewards[self.leader].rate if self.leader is not None else 0.0
        return self.rewards[arm].rate / leader if leader and self.measured(arm) else None

    def measured(self, arm: Strategy) -> bool:
        return arm in self.rewards and len(self.rewards[arm]) >= self.fewest


class Beg:
    def __init__(self, arms: Sequence[Strategy], settings: BegSettings = BegSettings(), rng: random.Random | None = None) -> None:
        self.settings = settings
        self.rng = rng or random.Random(settings.seed)
        self.starts = [start for start, _ in settings.buckets]
        self.buckets = [Bucket(affordable(arms, rows), settings) for _, rows in settings.buckets]
        self._nearest = [sorted(range(len(self.buckets)), key=lambda other: abs(other - i)) for i in range(len(self.buckets))]
        self._last_drafter = ""
        self._explored_s = self._lost_s = self._decode_s = 0.0
        self._trials = self._switches = 0
        self._shown = OFF

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
            bucket.trial = self._next_trial(index, bucket)
            if bucket.trial is not None:
                self._trials += 1
                bucket.tried, bucket.trial_left = bucket.trial, self.settings.longest_trial
                bucket.trial_rewards = Rewards(self.settings.longest_trial)
                rewards = bucket.rewards[bucket.trial]
                rewards.keep_last(2 * self.settings.trial_cycles)  # older ones were for shorter contexts
                bucket.before = (rewards.rate, rewards.error)
        if bucket.trial is None:
            return bucket.leader
        bucket.trial_left -= 1
        trial = bucket.trial
        if bucket.trial_left <= 0:
            bucket.trial = None
        return trial

    def observe(self, cycle: Cycle) -> None:
        context, arm = cycle.context, cycle.strategy
        settled = not arm.drafter or arm.drafter == self._last_drafter  # else the cycle paid for the drafter's catch-up
        self._last_drafter = arm.drafter
        if context.prefill_rows or not context.decoding or not context.speculable or cycle.step_s <= 0:
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
            bucket.account_s = min(opened + self.settings.regret_share * cycle.step_s - lost_s, 2 * step_s)
        if not settled:
            return
        bucket.rewards[arm].add(cycle.emitted, cycle.step_s)
        if arm == bucket.leader:
            change = leader.trim_if_drifted(self.settings.recent)
            if change != 1.0:
                bucket.scale_siblings(arm, change)
                bucket.account_s = max(bucket.account_s, leader.step_s * self.settings.credit_steps)
        elif arm == bucket.tried:
            bucket.trial_rewards.add(cycle.emitted, cycle.step_s)
            self._judge(bucket, arm)
            if bucket.trial is None:
                self._compare_with_before(bucket, arm)

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

    def _judge(self, bucket: Bucket, arm: Strategy) -> None:
        """Promote the arm, end its trial, or let it go on."""
        assert bucket.leader is not None
        leader, whole, now = bucket.rewards[bucket.leader], bucket.rewards[arm], bucket.trial_rewards
        noise = math.hypot(leader.error, whole.error)
        lowest_lead = leader.rate * (1 + self.settings.margin)
        if len(now) < self.settings.trial_cycles:
            return  # one stalled step must not decide
        if min(whole.rate, now.rate) > lowest_lead and whole.rate - leader.rate > noise:
            bucket.leader, bucket.trial = arm, None
            self._switches += 1
        elif whole.rate + 2 * noise < lowest_lead or bucket.account_s < 0:
            bucket.trial = None

    def _compare_with_before(self, bucket: Bucket, arm: Strategy) -> None:
        """A trial that contradicts the arm's own measured past says that its drafter has changed."""
        (before, error), now = bucket.before, bucket.trial_rewards
        if arm not in bucket.guessed and before and abs(now.rate - before) > 3 * math.hypot(error, now.error):
            bucket.scale_siblings(arm, now.rate / before)
        bucket.guessed.discard(arm)
        bucket.before = (0.0, math.inf)

    def _next_trial(self, index: int, bucket: Bucket) -> Strategy | None:
        """Promising unmeasured arms and arms that look better than the leader at once, others with probability epsilon; all on account."""
        bucket.cycles += 1
        if bucket.account_s < 0 or bucket.cycles < self.settings.trial_cycles:
            return None
        bucket.cycles = 0
        arms = [arm for arm in bucket.arms if arm != bucket.leader]
        expected = {arm: self._expected_ratio(index, arm) for arm in arms}
        assert bucket.leader is not None
        limit_s = 2 * self.settings.credit_steps * bucket.rewards[bucket.leader].step_s
        ready = [arm for arm in arms if bucket.account_s >= min(self._cost_s(bucket, arm, expected[arm]), 0.95 * limit_s)]
        urgent = [arm for arm in ready if expected[arm] > (1 + self.settings.margin if bucket.measured(arm) else 1 - self.settings.margin)]
        if urgent:
            return max(urgent, key=lambda arm: (expected[arm], -arm.rows))
        if ready and self.rng.random() < self.settings.epsilon:
            leader = bucket.rewards[bucket.leader].rate
            return max(ready, key=lambda arm: self.rng.gauss(expected[arm], self._doubt(bucket, arm) / leader if leader else 0.0))
        return None

    def _expected_ratio(self, index: int, arm: Strategy) -> float:
        """Rate over the leader's: measured here; else that of the drafter's nearest measured rung; else in the nearest bucket.

        Of an arm never tried it is 1, but where one drafter leads another one's arms are no urgent trial: a cold batch is short.
        """
        bucket = self.buckets[index]
        ratio = bucket.ratio(arm)
        if ratio is not None:
            return ratio
        rungs = [other for other in bucket.arms if other.drafter == arm.drafter and bucket.measured(other)]
        if rungs:
            return bucket.ratio(min(rungs, key=lambda other: abs(math.log(other.rows / arm.rows)))) or 1.0
        for other in self._nearest[index]:
            ratio = self.buckets[other].ratio(arm)
            if ratio is not None:
                return ratio
        return 1.0 if bucket.leader is None or bucket.leader.drafter in ("", arm.drafter) else 1.0 - self.settings.margin

    def _doubt(self, bucket: Bucket, arm: Strategy) -> float:
        """Standard deviation of what the arm's rate may be."""
        rewards = bucket.rewards[arm]
        return 2 * rewards.error if bucket.measured(arm) else bucket.rewards[bucket.leader].rate / 2 if bucket.leader else 0.0

    def _cost_s(self, bucket: Bucket, arm: Strategy, ratio: float) -> float:
        """Time that a shortest trial is expected to lose."""
        assert bucket.leader is not None
        step_s = bucket.rewards[arm].step_s
        if not bucket.measured(arm):  # at worst in proportion to the rows of the nearest measured arm
            near = min((other for other in bucket.arms if bucket.measured(other)), key=lambda other: abs(math.log(other.rows / arm.rows)))
            step_s = bucket.rewards[near].step_s * max(1.0, arm.rows / near.rows)
        return self.settings.trial_cycles * step_s * max(0.0, 1 - ratio)

    def _first_leader(self, index: int) -> Strategy:
        """What leads the next larger batch, since less load never makes speculation worse; else OFF."""
        for bucket in self.buckets[index + 1:]:
            if bucket.leader is not None:
                return bucket.leader if bucket.leader in self.buckets[index].rewards else OFF
        return OFF
