"""Every policy keeps the protocol; Beg finds the best arm, changes its mind, and loses little on
the way.
"""

import random

import pytest

from tlt_server.records import OFF, Cycle, StepContext, Strategy
from tlt_server.speculation.drafters import DRAFTERS
from tlt_server.speculation.knowledge import Knowledge
from tlt_server.speculation.policies import POLICIES, Setup
from tlt_server.speculation.policies.arms import CPU_ROWS, affordable, ladder
from tlt_server.speculation.policies.beg import Beg, BegSettings
from tlt_server.speculation.policies.capped import Capped
from tlt_server.speculation.policies.fixed import Fixed
from tlt_server.speculation.policies.off import Off
from tlt_server.speculation.policies.rewards import Rewards

ARMS = ladder(["eagle", "history"]).arms


def context(decoding=4, prefill_rows=0, speculable=None):
    return StepContext(
        decoding, prefill_rows, 100.0, decoding if speculable is None else speculable
    )


class World:
    """A decode loop whose truth is `step_s(arm, batch)` and `survival(arm)`: chance that each next
    draft token is accepted.
    """

    def __init__(self, step_s, survival, seed=0):
        self.step_s, self.survival = step_s, survival
        self.rng = random.Random(seed)
        self.seconds = self.tokens = 0.0
        self.used = []

    def accepted(self, arm):
        count = 0
        while count < arm.depth and self.rng.random() < self.survival(arm):
            count += 1
        return count

    def rate(self, arm, batch):
        """True tokens per second."""
        chance, mean = 1.0, 1.0
        for _ in range(arm.depth):
            chance *= self.survival(arm)
            mean += chance
        return batch * mean / self.step_s(arm, batch)

    def best(self, arms, batch):
        return max(arms, key=lambda arm: self.rate(arm, batch))

    def run(self, policy, batches, prefill_every=0):
        """Returns achieved time over the time that the best arm of each batch would have needed for
        the same tokens.
        """
        needed = spent = 0.0
        for i, batch in enumerate(batches):
            seen = context(batch, 32 if prefill_every and i % prefill_every == 0 else 0)
            arm = policy.choose(seen)
            accepted = tuple(self.accepted(arm) for _ in range(batch))
            step_s = (
                self.step_s(arm, batch)
                * self.rng.uniform(0.95, 1.05)
                * (10 if self.rng.random() < 0.003 else 1)
            )
            emitted = batch + sum(accepted)
            policy.observe(
                Cycle(
                    context=seen,
                    strategy=arm,
                    rows=batch * arm.rows,
                    emitted=emitted,
                    accepted=accepted,
                    drafted=batch * (arm.rows - 1),
                    step_s=step_s,
                )
            )
            self.used.append(arm)
            self.seconds += step_s
            self.tokens += emitted
            arms = affordable(
                ARMS, next(rows for start, rows in reversed(CPU_ROWS) if batch >= start)
            )
            spent += self.step_s(arm, batch)
            needed += (
                self.step_s(arm, batch)
                * self.rate(arm, batch)
                / self.rate(self.best(arms, batch), batch)
            )
        return spent / needed


def cpu_step_s(row_cost):
    """A CPU-like step: a fixed part, a part per row, and the drafter's forwards."""
    return lambda arm, batch: (
        1e-3
        * (
            1
            + row_cost * (batch * arm.rows - 1)
            + (0.12 * arm.depth * (1 + 0.02 * batch) if arm.drafter else 0)
        )
    )


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_policy_keeps_the_protocol(name):
    policy = POLICIES.resolve(name).make(Setup(ARMS, CPU_ROWS, Knowledge(("eagle", "history"))))
    world = World(cpu_step_s(0.1), lambda arm: 0.6)
    rng = random.Random(1)
    world.run(policy, [rng.choice([1, 3, 8, 50, 300]) for _ in range(400)], prefill_every=5)
    assert set(world.used) <= set(ARMS)
    assert all(isinstance(value, float) for value in policy.gauges().values())
    assert policy.choose(context(4, speculable=0)) == OFF  # no request wants speculation
    policy.choose(StepContext(0, 512, 0.0, 0))  # a step of prompts only


def test_off_stays_off():
    policy = Off()
    assert policy.choose(context(1)) == OFF


def test_fixed_uses_its_strategy_and_an_operator_may_cap_it():
    policy = Capped(Fixed([OFF, ARMS[3], ARMS[1]]), max_batch=8)
    assert policy.choose(context(8)) == ARMS[3]
    assert policy.choose(context(9)) == OFF
    assert Fixed([OFF]).choose(context(1)) == OFF


def test_every_bucket_has_several_arms_and_off():
    for bucket in Beg(ARMS).buckets:
        assert bucket.arms[0] == OFF and len(bucket.arms) >= 3
    assert set(ladder(["eagle"]).arms) == {
        OFF,
        *(Strategy("eagle", *arm) for arm in DRAFTERS["eagle"].cpu.rungs),
    }


@pytest.mark.parametrize("batch", [1, 4, 16, 64])
def test_where_off_is_best_little_is_lost(batch):
    losses = []
    for seed in range(6):
        world = World(cpu_step_s(0.8), lambda arm: 0.3, seed)
        assert world.best(ARMS, batch) == OFF
        losses.append(world.run(Beg(ARMS, rng=random.Random(seed)), [batch] * 1000))
    assert sum(losses) / len(losses) < 1 / 0.975 and max(losses) < 1 / 0.95


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_where_speculation_wins_most_of_the_gain_is_had(batch, seed):
    world = World(cpu_step_s(0.01), lambda arm: 0.85, seed)
    best, off = world.rate(world.best(ARMS, batch), batch), world.rate(OFF, batch)
    assert best > 2 * off
    assert world.run(Beg(ARMS, rng=random.Random(seed)), [batch] * 2000) < 1.12


def test_a_falling_batch_is_followed_down_and_up_again():
    world = World(cpu_step_s(0.08), lambda arm: 0.8)
    tail = [64] * 400 + [30] * 300 + [12] * 300 + [6] * 400 + [3] * 500 + [1] * 800
    policy = Beg(ARMS)
    first = world.run(policy, tail)
    assert world.used[300:400].count(OFF) > 70 and world.used[-100:].count(OFF) < 30
    again = world.run(policy, tail)
    assert first < 1.12 and again < 1.08
    assert world.used[len(tail) + 300 : len(tail) + 400].count(OFF) > 70  # nothing latched


def test_a_drafter_that_collapses_is_dropped_and_one_that_recovers_is_taken_up():
    quality = {"now": 0.85}
    world = World(cpu_step_s(0.05), lambda arm: quality["now"])
    policy = Beg(ARMS)
    world.run(policy, [2] * 600)
    assert world.used[-1] != OFF
    quality["now"] = 0.05
    world.run(policy, [2] * 400)
    assert world.used[-30:].count(OFF) > 20
    quality["now"] = 0.85
    world.run(policy, [2] * 2500)
    assert world.used[-100:].count(OFF) < 30


def test_equal_arms_do_not_make_it_flap():
    world = World(lambda arm, batch: 1e-3 * (1 + 0.6 * arm.depth), lambda arm: 0.6)
    policy = Beg(
        (OFF, Strategy("eagle", 1, 1, 2), Strategy("history", 1, 1, 2))
    )  # 1.6x the tokens in 1.6x the time
    world.run(policy, [4] * 3000)
    assert policy.gauges()["beg_switches"] <= 12


def test_the_account_bounds_what_exploration_loses():
    settings = BegSettings()
    for seed in range(5):
        world = World(cpu_step_s(2.0), lambda arm: 0.1, seed)  # every arm is terrible
        policy = Beg(ARMS, settings, random.Random(seed))
        ratio = world.run(policy, [8] * 3000)
        step_s = world.step_s(OFF, 8)
        overdraft_s = (settings.trial_cycles + 1) * world.step_s(
            Strategy("eagle", 5, 3, 9), 8
        )  # the last trial may overdraw
        allowed = settings.regret_share + (settings.credit_steps * step_s + overdraft_s) / (
            3000 * step_s
        )
        assert ratio - 1 < allowed


def test_it_is_deterministic_given_its_generator():
    runs = []
    for _ in range(2):
        world = World(cpu_step_s(0.1), lambda arm: 0.7, seed=4)
        world.run(Beg(ARMS, rng=random.Random(9)), [3] * 500)
        runs.append(world.used)
    assert runs[0] == runs[1]


def test_only_pure_decode_cycles_are_rewarded():
    policy = Beg(ARMS)
    world = World(cpu_step_s(0.1), lambda arm: 0.7)
    world.run(policy, [3] * 100, prefill_every=1)
    assert not any(len(rewards) for bucket in policy.buckets for rewards in bucket.rewards.values())
    assert world.used == [OFF] * 100


def test_the_first_cycle_of_another_drafter_is_not_rewarded():
    policy, arm = Beg(ARMS), ARMS[1]
    seen = context(4)
    policy.choose(seen)
    cycle = Cycle(
        context=seen, strategy=arm, rows=8, emitted=8, accepted=(1,) * 4, drafted=4, step_s=1.0
    )
    policy.observe(cycle)
    rewards = policy.buckets[policy._index(seen)].rewards[arm]
    assert len(rewards) == 0
    policy.observe(cycle)
    assert len(rewards) == 1


def test_rewards_forget_what_no_longer_holds():
    rewards, rng = Rewards(300), random.Random(0)
    for _ in range(200):
        rewards.add(rng.randint(1, 3), 0.02 * rng.uniform(0.8, 1.2))
        rewards.trim_if_drifted(24)
    assert len(rewards) > 150 and rewards.rate == pytest.approx(100, rel=0.1)
    for _ in range(40):
        rewards.add(1, 0.02)
        rewards.trim_if_drifted(24)
    assert rewards.rate < 65


def test_a_stalled_step_says_nothing_about_an_arm():
    rewards = Rewards(300)
    for step_s in (0.01, 0.01, 10.0, 0.01):
        rewards.add(2, step_s)
    assert rewards.rate == pytest.approx(200)


def test_the_error_of_a_rate_covers_what_samples_show():
    rng, inside = random.Random(3), 0
    for _ in range(300):
        rewards = Rewards(300)
        for _ in range(30):
            rewards.add(rng.choice([1, 1, 2, 4]), 0.01 * rng.uniform(0.7, 1.3))
        inside += abs(rewards.rate - 200) < 2 * rewards.error
    assert 0.9 < inside / 300 <= 1.0
