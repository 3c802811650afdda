"""The test of candidates for adoption."""

from __future__ import annotations

import numpy as np
import pytest

from tlt_server.trainer.judging.adoption_test import (
    CUT,
    LEVEL,
    AdoptionTest,
    Betting,
    GainInterval,
    Proof,
    gains,
    level_of,
)

RUNS, CANDIDATES, GROUPS = 1000, 4, 200


def made_up(seed: int, gain: float) -> list[np.ndarray]:
    """Gains of candidates: mostly small, now and then as large as they can be, as those of short
    responses are.
    """
    random = np.random.default_rng(seed)
    found = []
    for _ in range(CANDIDATES):
        noise_KT = 0.08 * random.standard_normal((RUNS, GROUPS))
        rare_KT = random.random((RUNS, GROUPS)) < 0.02
        noise_KT[rare_KT] = 0.6 * random.choice((-1, 1), rare_KT.sum())
        found.append(np.clip(noise_KT + gain, -1, 1))
    return found


def adopting_runs(gain_SKT: list[np.ndarray]) -> float:
    """Return the share of K runs that ever adopt a candidate, by gains [K runs, T observations] of
    each of their candidates.
    """
    adopted_K = np.zeros(len(gain_SKT[0]), np.bool_)
    for candidate, gain_KT in enumerate(gain_SKT):
        proof = Proof(len(gain_KT), candidate)
        for gain_K in gain_KT.T:
            proof.observe(gain_K)
        adopted_K |= proof.found_K
    return float(adopted_K.mean())


def test_candidates_without_gain_are_seldom_adopted() -> None:
    """1,000 runs are asked after each of 800 observations; at most 5 % may."""
    assert adopting_runs(made_up(0, 0.0)) <= 0.05
    assert adopting_runs(made_up(1, -0.01)) <= 0.01


def test_candidate_with_a_gain_is_adopted_in_most_runs() -> None:
    assert adopting_runs(made_up(2, 0.05)) > 0.95


def test_skewed_loss_is_not_mistaken_for_a_gain() -> None:
    """Many small gains and few large losses, together nothing: what a plain mean falls for."""
    random = np.random.default_rng(3)
    gain_KT = np.where(random.random((RUNS, GROUPS)) < 0.05, -0.95, 0.05)
    assert abs(gain_KT.mean()) < 0.01
    assert adopting_runs([gain_KT]) <= 0.05


def test_false_adoptions_stay_within_the_level_of_each_candidate() -> None:
    """Cut gains have a positive mean, gains as they are none: the bound of one candidate holds for
    each, and that of a whole drafter does not.
    """
    random, alone = np.random.default_rng(5), []
    for candidate in range(CANDIDATES):
        gain_KT = np.where(random.random((RUNS, GROUPS)) < 1 / 8, -0.7, 0.1)
        assert np.clip(gain_KT, -CUT, CUT).mean() > 0.03 > abs(gain_KT.mean())
        proof = Proof(RUNS, candidate)
        for gain_K in gain_KT.T:
            proof.observe(gain_K)
        alone.append(proof.found_K)
    assert max(found_K.mean() for found_K in alone) <= LEVEL
    assert LEVEL < np.any(alone, axis=0).mean() <= CANDIDATES * LEVEL


def test_repeated_trials_on_the_same_prompts_seldom_adopt() -> None:
    """Each candidate is the one before, trained on; an adoption after every third one."""
    random = np.random.default_rng(6)
    gain_KT, adopted_K = np.zeros((RUNS, 48)), np.zeros(RUNS, np.bool_)
    for candidate in range(12):
        gain_KT = 0.7 * gain_KT + 0.2 * random.standard_normal((RUNS, 48))
        proof = Proof(RUNS, candidate % 3)
        for gain_K in np.clip(gain_KT, -1, 1).T:
            proof.observe(gain_K)
        adopted_K |= proof.found_K
    assert adopted_K.mean() <= LEVEL


def test_significance_levels_of_candidates_sum_to_the_runs_level() -> None:
    assert sum(level_of(k, 0.05) for k in range(10_000)) == pytest.approx(0.05, rel=1e-3)


def test_confidence_interval_contains_the_mean_at_all_times() -> None:
    random = np.random.default_rng(4)
    missed = 0
    for _ in range(20):
        interval = GainInterval()
        assert interval.bounds == (0, -1, 1)
        missed_once = False
        for gain in np.clip(0.1 + 0.3 * random.standard_normal(GROUPS), -1, 1).tolist():
            interval.observe(gain)
            value, low, high = interval.bounds
            missed_once |= not low <= 0.1 <= high
        missed += missed_once
        assert low < value < high and high - low < 0.3
    assert missed <= 2


def test_candidate_is_adopted_only_on_proven_gain() -> None:
    group_N = np.arange(100, dtype=np.int32)
    before_N = np.full(100, 10.0)
    better, worse, same = (AdoptionTest() for _ in range(3))
    for test, after in ((better, 9.0), (worse, 11.0), (same, 10.0)):
        test.observe(before_N, np.full(100, after), group_N)
    assert better.better and not worse.better and not same.better
    assert better.groups == 100 and better.gain.low > 0
    later = AdoptionTest(candidate=50)
    later.observe(before_N[:60], np.full(60, 9.5), group_N[:60])
    sooner = AdoptionTest()
    sooner.observe(before_N[:60], np.full(60, 9.5), group_N[:60])
    assert later._proof.needed > sooner._proof.needed


def test_short_gains_do_not_outweigh_long_losses() -> None:
    before_N = np.array([10.0] * 99 + [10_000.0])
    after_N = np.array([9.0] * 99 + [11_000.0])
    test = AdoptionTest()
    test.observe(before_N, after_N, np.arange(100, dtype=np.int32))
    assert test.gain.low > 0 and not test.better


def test_responses_of_one_prompt_are_one_observation() -> None:
    before_N, after_N = np.array([4.0, 2.0, 8.0, 6.0]), np.array([4.0, 1.0, 4.0, 6.0])
    found = gains(before_N, after_N, np.array([7, 2, 7, 2], np.int32))
    assert found.tolist() == pytest.approx([(0 + 4 / 8) / 2, (1 / 2 + 0) / 2])


def test_few_prompts_prove_a_saving_of_40_percent() -> None:
    adopted, before_N = 0, np.full(28, 100.0)
    for run in range(20):
        random, test = np.random.default_rng(run), AdoptionTest(candidate=3)
        after_N = 100 * np.clip(0.6 + 0.25 * random.standard_normal(28), 0.1, 1.5)
        test.observe(before_N, after_N, np.arange(28, dtype=np.int32))
        adopted += test.better
    assert adopted >= 18


def test_two_dozen_prompts_prove_a_saving_of_a_fifth() -> None:
    adopted, before_N = 0, np.full(26, 100.0)
    for run in range(20):
        random, test = np.random.default_rng(run), AdoptionTest(candidate=1)
        after_N = 100 * np.clip(0.8 + 0.2 * random.standard_normal(26), 0.1, 1.5)
        test.observe(before_N, after_N, np.arange(26, dtype=np.int32))
        adopted += test.better
    assert adopted >= 15


def test_gains_out_of_bounds_are_refused() -> None:
    for bad in (1.5, float("nan")):
        with pytest.raises(ValueError, match=r"in \[-1, 1\]"):
            Betting(np.zeros(1)).observe(np.array([bad]))
    with pytest.raises(ValueError, match="above 0"):
        gains(np.array([1.0]), np.array([0.0]), np.zeros(1, np.int32))
