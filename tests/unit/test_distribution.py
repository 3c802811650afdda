"""Samples follow the processed distribution, independently over positions and seeds; and these
tests would see if they did not.

Expected probabilities are a float64 softmax with the filters written out here, nothing of the
sampler's. Every draw is fixed by its seed, so a test passes or fails for ever: P_LOWEST is the
chance that a right sampler would have failed when the seeds were chosen, 1e-4 for each of about 20
tests, while the wrong samplers below score under 1e-12.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tlt_kernels.cpu.noise import gumbel, philox4x32, uniform
from tlt_server.engine.sampling.sampler import SamplingState, sample
from tlt_server.wire.records import GenerateRequest, Sampling

P_LOWEST, P_DETECTED = 1e-4, 1e-12
DRAWS = 40_000
# Two Philox counters, the second one cut.
LOGITS_V = np.log(np.array([0.30, 0.05, 0.22, 0.13, 0.02, 0.20, 0.08]))
CASES = {
    "plain": Sampling(),
    "cool": Sampling(temperature=0.7),
    "hot": Sampling(temperature=1.6),
    "top_p": Sampling(top_p=0.8),
    "top_k": Sampling(top_k=3),
    "min_p": Sampling(min_p=0.25),
    "all": Sampling(temperature=0.9, min_p=0.1, top_k=5, top_p=0.85),
}


def probabilities(sampling: Sampling) -> np.ndarray:
    p = np.exp(LOGITS_V / sampling.temperature)
    p[p < sampling.min_p * p.max()] = 0
    order = np.argsort(-p)
    if sampling.top_k:
        p[order[sampling.top_k :]] = 0
    p /= p.sum()
    mass_before = np.cumsum(p[order]) - p[order]
    p[order[mass_before >= sampling.top_p]] = 0
    return p / p.sum()


def draws(sampling: Sampling, seeds: list[int], positions: np.ndarray) -> np.ndarray:
    """Tokens [seeds, positions] from the sampler."""
    requests = [
        GenerateRequest(id="r", token_ids=[0], sampling=sampling, seed=seed) for seed in seeds
    ]
    states = [SamplingState(request, len(LOGITS_V), []) for request in requests]
    rows = len(seeds) * len(positions)
    logits_SV = torch.from_numpy(np.tile(LOGITS_V.astype(np.float32), (rows, 1)))
    state_S = np.repeat(np.arange(len(seeds)), len(positions))
    position_S = np.tile(positions, len(seeds))
    return sample(
        logits_SV, states, state_S, position_S, np.zeros((rows, 0), np.int32)
    ).token_S.reshape(len(seeds), -1)


def p_value(counts: np.ndarray, p: np.ndarray) -> float:
    """Pearson's chi-square test: the chance of counts at least this far from p. A token of
    probability 0 may not appear.
    """
    assert counts[p == 0].sum() == 0
    expected = p[p > 0] * counts.sum()
    assert expected.min() >= 5, "too few draws for the chi-square approximation"
    statistic = ((counts[p > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    return float(
        torch.special.gammaincc(
            torch.tensor(freedom / 2, dtype=torch.float64),
            torch.tensor(statistic / 2, dtype=torch.float64),
        )
    )


def fit(tokens: np.ndarray, p: np.ndarray) -> float:
    return p_value(np.bincount(tokens.ravel(), minlength=len(p)), p)


def pair_fit(first: np.ndarray, second: np.ndarray, p: np.ndarray) -> float:
    """Return the fit of pairs to the product distribution: marginals and independence in one."""
    pairs = first.ravel() * len(p) + second.ravel()
    return p_value(np.bincount(pairs, minlength=len(p) ** 2), np.outer(p, p).ravel())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_tokens_over_positions_follow_the_distribution(name):
    tokens = draws(CASES[name], [20_240_601], np.arange(1, DRAWS + 1))
    assert fit(tokens, probabilities(CASES[name])) > P_LOWEST


@pytest.mark.parametrize("name", CASES)
def test_tokens_over_seeds_follow_the_distribution(name):
    tokens = draws(CASES[name], list(range(4_000)), np.array([17, 18, 900]))
    assert fit(tokens, probabilities(CASES[name])) > P_LOWEST


@pytest.mark.parametrize("distance", [1, 2, 256])
def test_sampled_positions_are_independent(distance):
    tokens = draws(Sampling(), [5], np.arange(1, DRAWS + 1))
    assert (
        pair_fit(tokens[:, :-distance], tokens[:, distance:], probabilities(Sampling())) > P_LOWEST
    )


@pytest.mark.parametrize("seeds", [[7, 8], [7, 7 + 2**32], [0, 2**64 - 1]])
def test_sampling_seeds_are_independent(seeds):
    tokens = draws(Sampling(), seeds, np.arange(1, DRAWS + 1))
    assert pair_fit(tokens[0], tokens[1], probabilities(Sampling())) > P_LOWEST


def test_fit_detects_a_temperature_off_by_a_tenth():
    tokens = draws(Sampling(temperature=1.1), [20_240_601], np.arange(1, DRAWS + 1))
    assert fit(tokens, probabilities(Sampling())) < P_DETECTED


def test_pair_fit_detects_noise_reused_by_two_positions():
    tokens = draws(Sampling(), [5], np.arange(1, DRAWS + 1) // 2 + 1)
    assert pair_fit(tokens[:, :-1], tokens[:, 1:], probabilities(Sampling())) < P_DETECTED


def test_fit_detects_shared_noise_under_classical_acceptance():
    """Draft with the shared noise, accept if u < p / q with the drafted token's own u, else draw
    from the residual: biased.
    """
    p, q = probabilities(Sampling()), probabilities(Sampling(temperature=1.6))
    residual = np.log(np.maximum(p - q, 1e-300))
    tokens = []
    for position in range(1, 4_001):
        noise = np.array([gumbel(np.uint64(3), v, position) for v in range(len(p))])
        drafted = int(np.argmax(np.log(q) + noise))
        u = uniform(philox4x32(3, 0, drafted >> 2, position)[drafted & 3])
        tokens.append(drafted if u < p[drafted] / q[drafted] else int(np.argmax(residual + noise)))
    assert fit(np.array(tokens), p) < P_DETECTED


def test_drafts_sharing_the_targets_noise_stay_exact():
    """The emitted token is the target's own whether the draft hits or not; sharing the noise only
    makes it hit more often.
    """
    p, q = probabilities(Sampling()), probabilities(Sampling(temperature=1.6))
    target = draws(Sampling(), [3], np.arange(1, 4_001))[0]
    noise = np.array(
        [[gumbel(np.uint64(3), v, position) for v in range(len(p))] for position in range(1, 4_001)]
    )
    hits = (np.argmax(np.log(q) + noise, axis=1) == target).mean()
    blind_hits = (p * q).sum()
    assert fit(target, p) > P_LOWEST
    # Standard error of a share over 4,000 draws is under 0.008.
    assert hits > blind_hits + 0.3
