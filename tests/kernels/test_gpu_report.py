"""Reports on sampled tokens against the numpy twin: raw log-probs, best tokens, skipped and broken
rows, bits, and the entries that they belong to.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.cycles import Cycle
from tests.kernels.test_gpu_sampling import NEAR, V_TARGET, Parameters, rows_of
from tests.kernels.triton_tests import DEVICE, assert_same_bits, gpu
from tlt_kernels import reference as twin
from tlt_kernels.gpu.report import TokenScores, emitted, score


def tokens_of(logits_SV: np.ndarray, seed: int) -> np.ndarray:
    return (
        np.random.default_rng(seed).integers(0, logits_SV.shape[1], len(logits_SV)).astype(np.int32)
    )


def scored(
    p: Parameters,
    logits_SV: np.ndarray,
    token_S: np.ndarray,
    rows: list[int] | None = None,
    **options: Any,
) -> TokenScores:
    token_S_on_device = torch.from_numpy(token_S).to(DEVICE)
    return score(**p.arguments(logits_SV, rows), token_S=token_S_on_device, **options)


def check_against_twin(
    logits_SV: np.ndarray, token_S: np.ndarray, p: Parameters, found: TokenScores, best: int
) -> int:
    """Compare with the twin; return the rows whose best tokens could be checked, because no
    threshold of a filter lies near a probability.
    """
    checked = 0
    raw_S, token_SK, logprob_SK = (values.cpu().numpy() for values in found)
    assert token_SK.shape[1] == min(best, logits_SV.shape[1])
    for s, logits in enumerate(logits_SV):
        raw = twin.log_softmax(logits)[token_S[s]]
        assert abs(raw_S[s] - raw) < 1e-5 * max(1, abs(raw)), f"row {s}: raw log-prob"
        greedy = p.temperature[s] < 1e-5
        z = logits if greedy else logits / p.temperature[s]
        keep, distance = (z > -np.inf, np.inf) if greedy else p.of_row(s).kept(z)
        if distance < NEAR:
            continue
        checked += 1
        exact = twin.log_softmax(np.where(keep, z, np.float32(-np.inf)))
        expected = [v for v in np.lexsort((np.arange(len(z)), -z)) if keep[v]][:best]
        listed = token_SK[s] >= 0
        assert token_SK[s][listed].tolist() == expected, f"row {s}: best tokens"
        np.testing.assert_allclose(
            logprob_SK[s][listed], exact[expected], rtol=1e-5, atol=1e-5, err_msg=f"row {s}"
        )
        assert not listed[len(expected) :].any() and (logprob_SK[s][~listed] == -np.inf).all()
        assert (logprob_SK[s] <= 0).all(), "no probability is above 1"
    return checked


@pytest.mark.parametrize(("size", "best"), [(2, 3), (5, 5), (130, 16), (1025, 1), (2100, 70)])
def test_raw_logprobs_and_top_tokens_equal_their_twin(size: int, best: int) -> None:
    logits_SV, p = rows_of(size, 8, size), Parameters(8, size)
    p.temperature[:] = [1, 0.7, 1.9, 0, 1, 0.05, 5, 1e-6]
    p.top_k[6], p.top_p[7] = 2, 0.5
    token_S = tokens_of(logits_SV, 1)
    for filtered in (False, True):
        if not filtered:
            q = Parameters(8, size)
            q.temperature[:] = p.temperature
        found = scored(p if filtered else q, logits_SV, token_S, filtered=filtered, best=best)
        assert check_against_twin(logits_SV, token_S, p if filtered else q, found, best) >= 7


def test_top_tokens_list_only_tokens_that_filters_keep() -> None:
    cases = list(itertools.product([0, 0.05], [0, 3, 40], [1, 0.9, 0.3]))
    logits_SV, p = rows_of(300, len(cases), 2), Parameters(len(cases), 2)
    p.min_p[:], p.top_k[:], p.top_p[:] = (np.array(column) for column in zip(*cases, strict=True))
    token_S = tokens_of(logits_SV, 2)
    found = scored(p, logits_SV, token_S, filtered=True, best=16)
    assert check_against_twin(logits_SV, token_S, p, found, 16) >= 0.9 * len(cases)
    assert (found.token_SK == -1).any() and (found.token_SK[0] >= 0).all()


def test_tied_top_tokens_are_listed_and_cut_by_rising_id() -> None:
    logits_SV, p = np.zeros((2, 2050), np.float32), Parameters(2, 3)
    logits_SV[:, 1::2] = np.float32(1.5)
    logits_SV[1] = -np.inf
    logits_SV[1, [9, 2049]] = [-2.5, -2.5]
    found = scored(p, logits_SV, np.array([1, 9], np.int32), filtered=False, best=4)
    assert found.token_SK.tolist() == [[1, 3, 5, 7], [9, 2049, -1, -1]]


def test_without_top_tokens_only_raw_logprobs_are_computed() -> None:
    logits_SV, p = rows_of(70, 3, 4), Parameters(3, 4)
    token_S = tokens_of(logits_SV, 4)
    assert (
        check_against_twin(
            logits_SV, token_S, p, scored(p, logits_SV, token_S, filtered=False, best=0), 0
        )
        == 3
    )


@pytest.mark.parametrize("filtered", [False, True])
def test_skipped_and_broken_rows_leave_other_sequences_alone(filtered: bool) -> None:
    logits_SV, p = rows_of(1500, 5, 7), Parameters(9, 7)
    p.top_k[:] = 20 if filtered else 0
    p.temperature[:] = np.linspace(0.5, 1.5, 9)
    token_S, rows = tokens_of(logits_SV, 7), [7, -1, 2, 2, 5]
    logits_SV[4, [3, 1400]] = np.nan, np.inf
    found = scored(p, logits_SV, token_S, rows, filtered=filtered, best=16)
    assert found.raw_logprob_S[4].isnan()
    for s in (0, 2, 3):
        one = Parameters(1)
        for name in ("temperature", "top_k"):
            getattr(one, name)[0] = getattr(p, name)[rows[s]]
        alone = scored(one, logits_SV[s : s + 1], token_S[s : s + 1], filtered=filtered, best=64)
        assert alone.token_SK[0, :16].tolist() == found.token_SK[s].tolist()
        assert_same_bits("logprob_SK", alone.logprob_SK[0, :16], found.logprob_SK[s])
        assert_same_bits("raw_logprob_S", alone.raw_logprob_S, found.raw_logprob_S[s : s + 1])


def test_sampled_token_has_its_own_logprob_among_the_top_tokens() -> None:
    """Compare to one ulp: the two kernels add in the same order, but what a compiler fuses may
    differ in the last bit.
    """
    logits_SV, p = rows_of(1100, 6, 8), Parameters(6, 8)
    p.temperature[::2], p.top_k[1::2] = 0.6, 9
    sampled = p.sample(logits_SV, filtered=True)
    found = scored(p, logits_SV, sampled.token_S.cpu().numpy(), filtered=True, best=1100)
    at_S1 = (found.token_SK == sampled.token_S[:, None]).nonzero()[:, 1:]
    torch.testing.assert_close(
        found.logprob_SK.gather(1, at_S1)[:, 0], sampled.logprob_S, rtol=1e-6, atol=1e-6
    )
    greedy = Parameters(6, 8)
    plain = greedy.sample(logits_SV, filtered=False)
    raw_logprob_S = scored(
        greedy, logits_SV, plain.token_S.cpu().numpy(), filtered=False, best=0
    ).raw_logprob_S
    torch.testing.assert_close(raw_logprob_S, plain.logprob_S, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("requests", "decode_rows"), [(1, 9), (4, 24), (3, 3)])
def test_emitted_tokens_are_found_at_their_samples(requests: int, decode_rows: int) -> None:
    said = 0
    for seed in range(6):
        cycle = Cycle(seed, requests=requests, depth=4, width=3, decode_rows=decode_rows, luck=0.9)
        outcome = cycle.accept()
        asking = list(range(len(outcome.count_E)))[seed % 2 :: 2] or [0]
        found = emitted(
            torch.tensor(asking, dtype=torch.int32, device=DEVICE),
            cycle.outcome_EF,
            cycle.trees,
            cycle.kept,
        )
        live = torch.zeros_like(found.row_S, dtype=torch.bool)
        for a, e in enumerate(asking):
            count = outcome.count_E[e]
            sample_N = found.sample_AN[a, :count]
            live[sample_N] = True
            assert found.token_S[sample_N].tolist() == outcome.token_EA[e, :count].tolist()
            logprobs = torch.from_numpy(cycle.logprob_S).to(DEVICE)[sample_N].cpu().numpy()
            assert logprobs.tobytes() == outcome.logprob_EA[e, :count].tobytes(), (
                "each sample has a log-prob of its own"
            )
            said += count
        assert torch.equal(found.row_S[live], cycle.trees.sample_row_S[live])
        assert (found.row_S[~live] == -1).all()
    assert said > 0


@gpu
def test_large_vocabulary_row_has_the_same_bits_in_any_batch() -> None:
    logits_SV, p = rows_of(V_TARGET, 256, 10), Parameters(256, 10)
    p.temperature[::3], p.temperature[5] = 0.8, 0
    p.top_p[::2], p.top_k[::4], p.min_p[::8] = 0.95, 50, 0.02
    token_S = tokens_of(logits_SV, 10)
    found = scored(p, logits_SV, token_S, filtered=True, best=32)
    few = Parameters(4, 10)
    for name in ("temperature", "top_p", "top_k", "min_p"):
        getattr(few, name)[:] = getattr(p, name)[:4]
    head = scored(p, logits_SV[:4], token_S[:4], [0, 1, 2, 3], filtered=True, best=32)
    assert check_against_twin(logits_SV[:4], token_S[:4], few, head, 32) >= 3
    for s in (0, 1, 4, 5, 100, 255):
        alone = scored(p, logits_SV[s : s + 1], token_S[s : s + 1], [s], filtered=True, best=32)
        assert alone.token_SK[0].tolist() == found.token_SK[s].tolist()
        assert_same_bits("logprob_SK", alone.logprob_SK[0], found.logprob_SK[s])
        assert_same_bits("raw_logprob_S", alone.raw_logprob_S, found.raw_logprob_S[s : s + 1])
