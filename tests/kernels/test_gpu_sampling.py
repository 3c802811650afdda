"""Sampling kernels against the numpy twin: tokens, log-probs, filters, ties, broken rows, bits."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.triton_tests import DEVICE, assert_same_bits, gpu
from tlt_kernels import reference as twin
from tlt_kernels.filters import FILTERS, NO_FILTERS, Filters
from tlt_kernels.gpu import filters, sampling
from tlt_kernels.gpu.tensors import BatchSlots, RowTable, Samples

NEAR = 2e-5  # a float threshold nearer than this to a probability may fall either way
V_TARGET = 152_064


def rows_of(size: int, count: int, seed: int, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((count, size)) * spread).astype(np.float32)


def combined() -> list[tuple[float, ...]]:
    """Return 18 combinations of filters, each of which keeps all tokens in some of them."""
    values = [
        (default, *((1, 40) if isinstance(default, int) else (0.3, 0.95)))
        for default in FILTERS.values()
    ]
    return random.Random(17).sample([*itertools.product(*values)], 18)


class Parameters:
    """Parameters of as many sequences as rows. Their batch slots are dealt out in reverse, so that
    no index is taken for another.
    """

    def __init__(self, count: int, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        self.seed = draw.integers(0, 2**64, count, dtype=np.uint64)
        self.position = draw.integers(0, 40_000, count)
        self.temperature = np.ones(count, np.float32)
        self.filters = NO_FILTERS.table(count)

    def __getattr__(self, name: str) -> np.ndarray:
        """Return a view of the values of one filter."""
        return self.filters[name]

    def of_row(self, s: int) -> Filters:
        return Filters(**dict(zip(FILTERS, self.filters[s].item(), strict=True)))

    def arguments(self, logits_SV: np.ndarray, rows: list[int] | None = None) -> dict[str, Any]:
        """Return the arguments of `sample`. Sampled row s is row `rows[s]` of the extend; row r
        belongs to sequence r, which has batch slot count - r.
        """
        count = len(self.seed)
        batch_slot_of = count - np.arange(count)

        def as_int(values: object) -> torch.Tensor:
            return torch.tensor(np.asarray(values), dtype=torch.int32, device=DEVICE)

        def at_batch_slots(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
            table = np.full((count + 1, *values.shape[1:]), -7, values.dtype)
            table[batch_slot_of] = values
            return torch.from_numpy(table).to(dtype).to(DEVICE)

        return {
            "logits_SV": torch.from_numpy(logits_SV).to(DEVICE),
            "row_S": as_int(range(count) if rows is None else rows),
            "rows": RowTable.allocate(0, 1, device=DEVICE)._replace(
                position_R=as_int(self.position), batch_slot_R=as_int(batch_slot_of)
            ),
            "batch_slots": BatchSlots.allocate(1, 1, hidden=1, device=DEVICE)._replace(
                seed_Q=at_batch_slots(self.seed.view(np.int64), torch.int64),
                temperature_Q=at_batch_slots(self.temperature, torch.float32),
                filters_QF=at_batch_slots(
                    self.filters.view(np.int32).reshape(count, -1), torch.int32
                ),
            ),
        }

    def sample(
        self, logits_SV: np.ndarray, rows: list[int] | None = None, **options: bool
    ) -> Samples:
        return sampling.sample(**self.arguments(logits_SV, rows), **options)


def check_against_twin(logits_SV: np.ndarray, p: Parameters, found: Samples) -> int:
    """Compare with the twin; return the rows whose token could be checked, because no threshold and
    no runner-up is near.
    """
    checked = 0
    tokens, logprobs = found.token_S.cpu().numpy(), found.logprob_S.cpu().numpy()
    for s, logits in enumerate(logits_SV):
        noise = twin.gumbel(int(p.seed[s]), np.arange(len(logits)), int(p.position[s]) + 1)
        temperature = 0 if p.temperature[s] < 1e-5 else p.temperature[s]
        token, exact, distance = twin.sample(logits, temperature, p.of_row(s), noise)
        score = exact if temperature == 0 else exact + noise
        runner_up = np.sort(score)[-2:]
        if distance < NEAR or (
            temperature != 0 and len(score) > 1 and runner_up[1] - runner_up[0] < NEAR
        ):
            continue
        checked += 1
        assert tokens[s] == token, f"row {s}: token {tokens[s]}, twin {token}, distance {distance}"
        assert abs(logprobs[s] - exact[token]) < 1e-5 * max(1, abs(exact[token])), (
            f"row {s}: log-prob"
        )
    return checked


@pytest.mark.parametrize("size", [1, 5, 1023, 1025, 4100])
def test_sampled_tokens_and_logprobs_equal_their_twin(size):
    count = 8
    logits_SV, p = rows_of(size, count, size), Parameters(count, size)
    p.temperature[:] = [1, 0.7, 1.9, 0, 1, 0.05, 5, 1e-6]
    found = p.sample(logits_SV, filtered=False)
    assert check_against_twin(logits_SV, p, found) >= count - 1


@pytest.mark.parametrize(
    ("size", "whole_row"), [(1, False), (5, False), (130, True), (1025, False), (4100, True)]
)
def test_combined_filters_equal_their_twin(size, whole_row, monkeypatch):
    if whole_row:
        monkeypatch.setattr(filters, "CAPACITY", 1)
    cases = combined()
    count = len(cases)
    logits_SV, p = rows_of(size, count, size + 1), Parameters(count, size)
    p.filters[:] = cases
    p.temperature[::5], p.temperature[1::7] = 0.6, 0
    found = p.sample(logits_SV, filtered=True)
    assert check_against_twin(logits_SV, p, found) >= 0.9 * count


def test_flat_and_peaked_rows_are_filtered_like_the_twin():
    flat = np.linspace(0, 1e-3, 3000, dtype=np.float32)[None].repeat(3, 0)
    peaked = np.zeros((3, 3000), np.float32)
    peaked[:, 1234] = 60
    masked = np.where(np.arange(3000) % 7 == 0, rows_of(3000, 3, 3), np.float32(-np.inf))
    logits_SV, p = np.concatenate([flat, peaked, masked]), Parameters(9, 4)
    p.top_p[0::3], p.top_k[1::3], p.min_p[2::3] = 0.9, 700, 0.9
    assert check_against_twin(logits_SV, p, p.sample(logits_SV, filtered=True)) >= 8


def kept_tokens(logits_SV: np.ndarray, p: Parameters) -> np.ndarray:
    """Return a mask of the tokens that the filters keep."""
    cut_S, last_S = (t.cpu().numpy()[:, None] for t in filters.cuts(**p.arguments(logits_SV)))
    z_SV = logits_SV / np.maximum(p.temperature, 1e-5)[:, None]
    return (z_SV > cut_S) | ((z_SV == cut_S) & (np.arange(logits_SV.shape[1]) <= last_S))


@pytest.mark.parametrize(("capacity", "sampled"), [(60, 256), (400, 1024), (400, 16)])
def test_top_p_bracket_and_list_keep_the_same_tokens(
    capacity: int, sampled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 4100
    even = [rows_of(size, 3, 20 + i, spread) for i, spread in enumerate((1e-4, 0.7, 2.5, 30.0))]
    masked = np.where(np.arange(size) % 5 == 0, rows_of(size, 3, 30), np.float32(-np.inf))
    tied = np.round(rows_of(size, 3, 31) * 2) / np.float32(2)
    logits_SV = np.concatenate([*even, masked, tied, np.zeros((3, size), np.float32)])
    p = Parameters(len(logits_SV), 13)
    p.top_p[0::3], p.top_p[1::3], p.top_p[2::3] = 0.95, 0.4, 0.99999
    p.temperature[1::3] = 2.0  # halves: divided exactly
    expected = kept_tokens(logits_SV, p)
    monkeypatch.setattr(filters, "CAPACITY", capacity)
    monkeypatch.setattr(filters, "SAMPLED", sampled)
    found = kept_tokens(logits_SV, p)
    assert (found == expected).all()
    assert expected.sum(axis=1).max() > 10 * capacity


def test_tokens_with_close_scores_are_compared_exactly():
    logits_SV, p = np.zeros((24, 64), np.float32), Parameters(24, 12)
    # Four neighbours with nothing else near: the bounds of their scores lie far above the scores.
    logits_SV[:, 8:12] = 40
    logits_SV[12:, 10] = 40.3
    assert check_against_twin(logits_SV, p, p.sample(logits_SV, filtered=False)) >= 23


def test_ties_go_to_the_lowest_ids():
    logits_SV = np.zeros((4, 2050), np.float32)
    logits_SV[:, ::2] = np.float32(1.5)
    p = Parameters(4, 5)
    p.top_k[0], p.top_p[1], p.temperature[2] = 3, 1e-4, 0
    p.top_k[3] = 1026  # all of the larger ones, and the first of the others
    found = p.sample(logits_SV, filtered=True)
    assert found.token_S[0] in (0, 2, 4)
    assert abs(found.logprob_S[0].item() + np.log(3)) < 1e-6
    assert found.token_S[1] == 0
    assert found.token_S[2] == 0
    cut_S, last_S = filters.cuts(
        torch.from_numpy(logits_SV).to(DEVICE),
        torch.arange(4, dtype=torch.int32, device=DEVICE),
        RowTable.allocate(4, 1, device=DEVICE)._replace(
            batch_slot_R=torch.arange(4, dtype=torch.int32, device=DEVICE)
        ),
        BatchSlots.allocate(4, 1, hidden=1, device=DEVICE)._replace(
            temperature_Q=torch.tensor([1.0, 1, 0, 1], device=DEVICE),
            filters_QF=torch.from_numpy(p.filters.view(np.int32).reshape(4, -1)).to(DEVICE),
        ),
    )
    assert cut_S.tolist() == [1.5, 1.5, -np.inf, 0.0]
    assert last_S.tolist() == [4, 0, 2050, 1]


@pytest.mark.parametrize("filtered", [False, True])
def test_broken_rows_report_nan_and_change_no_other_row(filtered):
    logits_SV, p = rows_of(1100, 6, 6), Parameters(6, 6)
    p.top_p[:] = 0.9 if filtered else 1
    whole = p.sample(logits_SV, filtered=filtered)
    logits_SV[0, 1050], logits_SV[1, 3], logits_SV[2] = np.nan, np.inf, -np.inf
    logits_SV[3] = np.nan
    found = p.sample(logits_SV, filtered=filtered)
    assert found.token_S[:4].tolist() == [0, 0, 0, 0]
    assert found.logprob_S[:4].isnan().all()
    assert found.token_S[4:].tolist() == whole.token_S[4:].tolist()
    assert_same_bits("logprob_S", found.logprob_S[4:], whole.logprob_S[4:])


@pytest.mark.parametrize("filtered", [False, True])
def test_rows_find_their_sequence_and_dead_rows_give_no_token(filtered):
    logits_SV, p = rows_of(1500, 5, 7), Parameters(9, 7)
    p.top_k[:] = 20 if filtered else 0
    p.temperature[:] = np.linspace(0.5, 1.5, 9)
    rows = [7, -1, 2, 2, -1]
    found = p.sample(logits_SV, rows, filtered=filtered)
    assert found.token_S[[1, 4]].tolist() == [-1, -1]
    assert found.logprob_S[[1, 4]].tolist() == [0, 0]
    for s in (0, 2, 3):
        one = Parameters(1)
        for name in ("seed", "position", "temperature", "top_k"):
            getattr(one, name)[0] = getattr(p, name)[rows[s]]
        alone = one.sample(logits_SV[s : s + 1], filtered=filtered)
        assert alone.token_S.item() == found.token_S[s].item()
        assert_same_bits("logprob_S", alone.logprob_S, found.logprob_S[s : s + 1])


def test_unfiltered_rows_keep_their_bits_next_to_filtered_rows():
    logits_SV, p = rows_of(2100, 6, 8), Parameters(6, 8)
    plain = p.sample(logits_SV, filtered=False)
    p.top_p[::2], p.top_k[::2] = 0.5, 9
    mixed = p.sample(logits_SV, filtered=True)
    assert mixed.token_S[1::2].tolist() == plain.token_S[1::2].tolist()
    assert_same_bits("logprob_S", mixed.logprob_S[1::2], plain.logprob_S[1::2])


@pytest.mark.parametrize("filtered", [False, True])
def test_tokens_follow_the_processed_distribution(filtered):
    count, size = (50 if filtered else 300), 6
    row = np.array([1.0, 0.2, -0.5, 1.4, -2, 0.9], np.float32)
    logits_SV, p = row[None].repeat(count, 0), Parameters(count, 9)
    p.temperature[:], p.top_k[:] = 0.8, 4 if filtered else 0
    tokens = p.sample(logits_SV, filtered=filtered).token_S.cpu().numpy()
    z = row / np.float32(0.8)
    keep, _ = Filters(top_k=4 if filtered else 0).kept(z)
    expected = np.exp(twin.log_softmax(np.where(keep, z, np.float32(-np.inf)))) * count
    observed = np.bincount(tokens, minlength=size)
    assert observed[~keep].sum() == 0
    chi_square = ((observed - expected)[keep] ** 2 / expected[keep]).sum()
    # 0.999 quantiles at 3 and 5 degrees of freedom.
    assert chi_square < (16.3 if filtered else 20.5)


@gpu
@pytest.mark.parametrize("filtered", [False, True])
def test_a_row_has_the_same_bits_alone_and_among_256(filtered):
    logits_SV, p = rows_of(V_TARGET, 256, 10), Parameters(256, 10)
    p.temperature[::3] = 0.8
    if filtered:
        p.top_p[::2], p.top_k[::4], p.min_p[::8] = 0.95, 50, 0.02
        p.top_p[1], p.top_k[3] = 0.9999, 5000
    found = p.sample(logits_SV, filtered=filtered)
    for s in (0, 1, 3, 4, 100, 255):
        alone = p.sample(logits_SV[s : s + 1], [s], filtered=filtered)
        assert alone.token_S.item() == found.token_S[s].item()
        assert_same_bits("logprob_S", alone.logprob_S, found.logprob_S[s : s + 1])


@gpu
@pytest.mark.parametrize("spread", [1e-4, 2.5, 30.0])
def test_large_vocabulary_is_sampled_like_the_twin(spread):
    cases = list(itertools.product([0, 0.05], [0, 50, 3000], [1, 0.95, 0.3]))
    logits_SV, p = rows_of(V_TARGET, len(cases), 11, spread), Parameters(len(cases), 11)
    p.min_p[:], p.top_k[:], p.top_p[:] = (np.array(column) for column in zip(*cases, strict=True))
    checked = check_against_twin(logits_SV, p, p.sample(logits_SV, filtered=True))
    assert checked >= (len(cases) * 0.8 if spread > 1 else 6)
