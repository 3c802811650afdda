"""Every policy keeps the protocol; `beg` is the paper's bandit, and starts from what is known."""

import random

import pytest

from tlt_server.speculation.cost import Measured, StepLoad
from tlt_server.speculation.knowledge import Knowledge
from tlt_server.speculation.policies import POLICIES, Setup
from tlt_server.speculation.policies.arms import CPU_GROUPS, GPU_GROUPS, BatchGroup, Ladder, ladder
from tlt_server.speculation.policies.beg import Beg, BegSettings
from tlt_server.speculation.policies.fixed import Fixed
from tlt_server.speculation.policies.off import Off
from tlt_server.speculation.policies.pinned import Pinned, limit
from tlt_server.speculation.sizes import AnySize
from tlt_server.wire.records import OFF, Arms, Cycle, Pin, StepContext, Strategy

LADDER = ladder(["eagle", "history"])
CHAINS = tuple(Strategy("eagle", depth, 1, 8) for depth in (2, 4, 7))
ONE_GROUP = Ladder((OFF, *CHAINS), (BatchGroup(1, 8),))


def context(decoding=4, prefill_rows=0, speculable=None):
    return StepContext(
        decoding, prefill_rows, 100.0, decoding if speculable is None else speculable
    )


class World:
    """A decode loop whose truth is `step_s(arm, batch)` and `survival(arm)`: chance that each next
    draft token is accepted.
    """

    def __init__(self, step_s, acceptance, seed=0):
        self.step_s, self.acceptance = step_s, acceptance
        self.rng = random.Random(seed)
        self.used = []

    def accepted(self, arm):
        count = 0
        while count < arm.depth and self.rng.random() < self.acceptance(arm):
            count += 1
        return count

    def rate(self, arm, batch):
        """True tokens per second."""
        chance, mean = 1.0, 1.0
        for _ in range(arm.depth):
            chance *= self.acceptance(arm)
            mean += chance
        return batch * mean / self.step_s(arm, batch)

    def best(self, arms, batch):
        return max(arms, key=lambda arm: self.rate(arm, batch))

    def run(self, policy, batches, prefill_every=0):
        """Runs a step for each of the batches."""
        for i, batch in enumerate(batches):
            seen = context(batch, 32 if prefill_every and i % prefill_every == 0 else 0)
            arm = policy.choose(seen)
            accepted = tuple(self.accepted(arm) for _ in range(batch))
            policy.observe(
                Cycle(
                    context=seen,
                    strategy=arm,
                    rows=batch * arm.rows,
                    emitted=batch + sum(accepted),
                    accepted=accepted,
                    drafted=batch * (arm.rows - 1),
                    step_s=self.step_s(arm, batch) * self.rng.uniform(0.95, 1.05),
                )
            )
            self.used.append(arm)


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
def test_every_policy_obeys_the_policy_protocol(name):
    setup = Setup(LADDER, LADDER.arms[2], Knowledge(("eagle", "history")), AnySize())
    policy = POLICIES.resolve(name).make(setup)
    world = World(cpu_step_s(0.1), lambda arm: 0.6)
    rng = random.Random(1)
    batches = [rng.choice([1, 3, 8, 50, 300]) for _ in range(400)]
    world.run(policy, batches, prefill_every=5)
    for batch, used in zip(batches, world.used, strict=True):
        assert used in {*policy.strategies(range(batch, batch + 1), prompts=False)}
    assert all(isinstance(value, float) for value in policy.gauges().values())
    assert policy.choose(context(4, speculable=0)) == OFF  # no request wants speculation
    policy.choose(StepContext(0, 512, 0.0, 0))  # a step of prompts only


def test_policy_off_never_drafts():
    policy = Off()
    assert policy.choose(context(1)) == OFF


def test_fixed_policy_uses_its_strategy_within_an_operators_cap():
    policy = Pinned(Fixed(LADDER.arms[3]), limit(8))
    assert policy.choose(context(8)) == LADDER.arms[3]
    assert policy.choose(context(9)) == OFF and limit(0) == ()
    assert {*policy.strategies(range(8, 9), prompts=False)} == {OFF, LADDER.arms[3]}
    assert {*policy.strategies(range(9, 10), prompts=False)} == {OFF}
    assert Fixed(OFF).choose(context(1)) == OFF


def test_first_matching_pin_decides_and_policy_keeps_learning():
    seen = []

    class Watching(Off):
        def observe(self, cycle):
            seen.append(cycle)

    small, large = LADDER.arms[1], LADDER.arms[2]
    policy = Pinned(Watching(), [Pin(2, 4, small), Pin(4, 6, large)])
    found = [policy.choose(context(requests)) for requests in range(1, 8)]
    assert found == [OFF, small, small, small, large, large, OFF]
    assert policy.choose(context(3, speculable=0)) == OFF
    policy.observe("a cycle")
    assert seen == ["a cycle"]


def test_arms_setting_keeps_only_named_arms_and_off():
    both = ladder(["eagle", "history"])
    own = Strategy("eagle", 5, 1, 6)
    found = both.within(Arms(("history",), (own,))).arms
    assert found[0] == OFF and found[-1] == own
    assert {arm.drafter for arm in found[1:-1]} == {"history"} and both.within(None) is both


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_group_of_batch_sizes_has_arms_of_its_rows(device):
    found = ladder(["eagle", "history"], device)
    for index, group in enumerate(found.groups):
        arms = found.of_group(index)
        assert {arm.rows for arm in arms} == {group.rows}
        assert found.group(group.start) == index
    assert found.of_group(found.group(10**6)) == (OFF,)


def test_groups_never_grow_with_the_batch():
    """`Shapes.captured` asks for the smallest and the largest batch of a bucket."""
    for groups in (CPU_GROUPS, GPU_GROUPS):
        rows = [group.rows for group in groups]
        assert rows == sorted(rows, reverse=True)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_beg_finds_the_best_arm_and_explores_a_tenth(seed):
    world = World(cpu_step_s(0.01), lambda arm: 0.9, seed)
    policy = Beg(ONE_GROUP, Knowledge(("eagle",)), BegSettings(seed=seed))
    world.run(policy, [4] * 1000)
    best = world.best(CHAINS, 4)
    assert world.used[500:].count(best) > 0.85 * 500
    assert policy.gauges()["beg_explored_share"] == pytest.approx(0.1, abs=0.03)


def test_beg_follows_a_drafter_that_gets_worse():
    acceptance = [0.95]
    world = World(cpu_step_s(0.01), lambda arm: acceptance[0])
    policy = Beg(ONE_GROUP, Knowledge(("eagle",)))
    world.run(policy, [4] * 600)
    assert world.used[-50:].count(CHAINS[-1]) > 35
    acceptance[0] = 0.1
    world.run(policy, [4] * 3000)
    assert world.used[-50:].count(CHAINS[0]) > 35


def test_beg_starts_with_known_rewards():
    knowledge = Knowledge(("eagle",))
    knowledge.cost.profile(
        Measured(load, 1e-3 * (4 + load.depth))
        for depth in (0, 2, 7)
        for load in [StepLoad("eagle" if depth else "", depth, 1, 4, 32, 0, 100.0)]
    )
    policy = Beg(ONE_GROUP, knowledge, BegSettings(epsilon=0.0))
    assert policy.choose(context(4)) == CHAINS[-1], "the estimate is hopeful, and a level is cheap"


def test_beg_rewards_only_pure_decode_cycles():
    policy = Beg(ONE_GROUP, Knowledge(("eagle",)), BegSettings(epsilon=0.0))
    for prefill_rows, arm in ((0, CHAINS[1]), (32, CHAINS[2])):
        policy.observe(
            Cycle(
                context=context(4, prefill_rows),
                strategy=arm,
                rows=32,
                emitted=20,
                accepted=(4,) * 4,
                drafted=28,
                step_s=1e-3 if prefill_rows else 1e-2,
            )
        )
    assert policy.choose(context(4)) == CHAINS[1]
