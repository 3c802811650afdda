"""The sampler equals its slow twin in every processing step, and a row's bits depend on nothing but
that row.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tlt_kernels import reference
from tlt_kernels.cpu.noise import gumbel
from tlt_kernels.cpu.sampling import exp_nonpositive
from tlt_kernels.filters import FILTERS, Filters
from tlt_server.engine.sampling.sampler import Sampled, SamplingState, prompt_logprobs, sample
from tlt_server.wire.records import GenerateRequest, Sampling

NO_PATH = np.zeros((1, 0), np.int32)
# Fast and slow differ in the rounding of exp (1e-7 relative per term) and of the result (half a
# float32 ulp).
LOGPROB_TOLERANCE = {"rtol": 3e-7, "atol": 1e-6}


@dataclasses.dataclass
class Row:
    """One sequence about to sample its next token."""

    logits: np.ndarray
    sampling: Sampling
    seed: int = 0
    prompt: tuple[int, ...] = (0,)
    output: tuple[int, ...] = ()
    path: tuple[int, ...] = ()
    eos: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output) + len(self.path)

    def state(self) -> SamplingState:
        request = GenerateRequest(
            id="r", token_ids=list(self.prompt), sampling=self.sampling, seed=self.seed
        )
        state = SamplingState(request, len(self.logits), self.eos)
        state.commit(self.output)
        return state


def row(logits: list[float] | np.ndarray, *, of: dict | None = None, **sampling: Any) -> Row:
    """`of`: fields of the row itself."""
    return Row(np.array(logits, np.float32), Sampling(**sampling), **of or {})


def sampled(*rows: Row) -> Sampled:
    depth = max(len(row.path) for row in rows)
    path_SD = np.full((len(rows), depth), -1, np.int32)
    for s, row in enumerate(rows):
        path_SD[s, : len(row.path)] = row.path
    logits_SV = torch.from_numpy(np.stack([row.logits for row in rows]))
    positions, states = np.array([row.position for row in rows]), [row.state() for row in rows]
    return sample(logits_SV, states, np.arange(len(rows)), positions, path_SD)


def bits(result: Sampled, s: int) -> tuple:
    raw = None if result.raw_logprob_S is None else result.raw_logprob_S[s].tobytes()
    top = result.top[s]
    return (
        int(result.token_S[s]),
        result.logprob_S[s].tobytes(),
        raw,
        top and (top.token_ids, np.float32(top.logprobs).tobytes()),
    )


def noise_of(row: Row) -> np.ndarray:
    seed, tokens = np.uint64(row.seed), range(len(row.logits))
    return np.array([gumbel(seed, v, row.position) for v in tokens], np.float32)


def ends(output: list[int], tokens: list[int]) -> bool:
    return output[len(output) - len(tokens) :] == tokens and len(output) >= len(tokens)


def expected(row: Row) -> tuple[int, np.ndarray, float]:
    p = row.sampling
    stops = set(p.stop_token_ids) | (set() if p.ignore_eos else set(row.eos))
    output = [*row.output, *row.path]
    edited = reference.edited(
        row.logits,
        p.logit_bias | {last: -np.inf for *before, last in p.bad_words if ends(output, before)},
        list(row.prompt),
        output,
        p.repetition_penalty,
        p.presence_penalty,
        p.frequency_penalty,
        sorted(stops) if len(output) < p.min_tokens else [],
        p.allowed_token_ids,
    )
    return reference.sample(edited, p.temperature, Filters.of(p), noise_of(row))


SIZES = st.sampled_from([1, 2, 5, 16, 17, 63, 130, 300])


@st.composite
def rows(draw, filters: bool = True, edits: bool = True, size: int | None = None) -> Row:
    size = size or draw(SIZES)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.0, 0.1, 1.0, 3.0, 10.0, 60.0]))
    offset = draw(st.sampled_from([0.0, -40.0, 900.0]))
    logits = (rng.standard_normal(size) * spread + offset).astype(np.float32)
    if draw(st.booleans()):
        logits = np.round(logits)  # ties
    fields: dict = {"temperature": draw(st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.7]))}
    tokens = st.lists(st.integers(0, size - 1), max_size=6).map(tuple)
    if filters:
        for name, default in FILTERS.items():
            values = [1, 3, 20, 200] if isinstance(default, int) else [0.0, 0.013, 0.3, 0.9, 0.999]
            fields[name] = draw(st.sampled_from([default, *values]))
    if edits:
        biases = st.sampled_from([-100.0, -1.5, 2.25])
        stops = st.lists(st.integers(0, size - 1), max_size=2).map(tuple)
        fields |= {
            "repetition_penalty": draw(st.sampled_from([1.0, 0.8, 1.3])),
            "presence_penalty": draw(st.sampled_from([0.0, 0.7, -0.4])),
            "frequency_penalty": draw(st.sampled_from([0.0, 0.3])),
            "logit_bias": draw(st.dictionaries(st.integers(0, size - 1), biases, max_size=3)),
            "min_tokens": draw(st.integers(0, 8)),
            "stop_token_ids": draw(stops) if size > 2 else (),
        }
    fields |= {"logprobs": draw(st.sampled_from([0, 4])), "raw_logprobs": draw(st.booleans())}
    return Row(
        logits,
        Sampling(**fields),
        seed=draw(st.integers(0, 2**64 - 1)),
        prompt=draw(tokens.filter(len)),
        output=draw(tokens) if edits else (),
        path=draw(tokens) if edits else (),
    )


@pytest.mark.slow
@given(rows(size=63), st.data())
@settings(max_examples=100, deadline=None)
def test_only_allowed_tokens_are_sampled_and_no_bad_word(row: Row, data: st.DataObject) -> None:
    tokens = st.sets(st.integers(0, 62), max_size=5)
    single, several = data.draw(tokens), data.draw(tokens)
    banned = {*single}
    allowed = data.draw(tokens)
    free = 31 if 31 not in row.sampling.stop_token_ids else 30
    text = [*row.output, *row.path]
    befores = [text[at:] for at in range(len(text))] + [[7], [*text, 7]]
    words = [(*data.draw(st.sampled_from(befores)), token) for token in sorted(several - {free})]
    banned |= {last for *before, last in words if ends(text, before)}
    sampling = msgspec.structs.replace(
        row.sampling,
        bad_words=(*((token,) for token in sorted(single - {free})), *words),
        allowed_token_ids=tuple(sorted(allowed | {free})) if allowed else (),
        stop_token_ids=tuple({*row.sampling.stop_token_ids} - {free}),
    )
    row = dataclasses.replace(row, sampling=sampling)
    check_against_twin(row)
    [token] = sampled(row).token_S
    assert token not in banned - {free} and (not allowed or token in allowed | {free})


def check_against_twin(row: Row) -> None:
    token, logprobs, distance = expected(row)
    assume(distance > 1e-5)  # where the rounding of a sum decides, nothing is said
    result = sampled(row)
    assert result.token_S[0] == token
    np.testing.assert_allclose(result.logprob_S[0], logprobs[token], **LOGPROB_TOLERANCE)
    if row.sampling.raw_logprobs:
        raw = reference.log_softmax(row.logits)[token]
        np.testing.assert_allclose(result.raw_logprob_S[0], raw, **LOGPROB_TOLERANCE)
    if row.sampling.logprobs:
        ordered = sorted(range(len(logprobs)), key=lambda v: (-logprobs[v], v))
        order = [v for v in ordered if logprobs[v] > -np.inf]
        top = result.top[0]
        # The order of the twin comes from float64 log-probs, which separate what float32 z
        # separates.
        assert [*top.token_ids] == order[: row.sampling.logprobs]
        np.testing.assert_allclose(top.logprobs, logprobs[[*top.token_ids]], **LOGPROB_TOLERANCE)
    else:
        assert result.top[0] is None


@pytest.mark.parametrize(
    ("filters", "edits"),
    [
        (False, False),
        *(
            pytest.param(*kind, marks=pytest.mark.slow)
            for kind in ((True, False), (False, True), (True, True))
        ),
    ],
)
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_sampler_equals_its_twin(filters: bool, edits: bool, data: st.DataObject) -> None:
    check_against_twin(data.draw(rows(filters, edits)))


# From one bin holding all to most tokens in bins of their own.
@pytest.mark.parametrize("spread", [0.003, 0.3, 5.0])
@pytest.mark.parametrize(
    "filters",
    [{"top_k": k} for k in (1, 2, 7, 150, 299, 300)] + [{"top_p": p / 37} for p in range(1, 37, 3)],
)
def test_filtered_token_set_equals_its_twin(spread, filters):
    logits = (np.random.default_rng(11).standard_normal(300) * spread).astype(np.float32)
    sampling = Sampling(**filters, logprobs=300)
    keep, distance = Filters.of(sampling).kept(logits)
    # Far enough: the weights err by 1e-7 relative each, their sums by much less.
    assert distance > 1e-7
    [top] = sampled(Row(logits, sampling)).top
    assert sorted(top.token_ids) == np.flatnonzero(keep).tolist()


@pytest.mark.parametrize("size", [512, 5000])
@pytest.mark.parametrize(
    "spread, offset", [(0.0, 0.0), (0.3, 1e3), (3.0, 0.0), (30.0, -1e5), (1.0, 1e7), (1e3, 3e8)]
)
def test_skipping_logarithms_never_changes_the_winner(size, spread, offset):
    rng = np.random.default_rng(7)
    for seed in range(6):
        one = row(rng.standard_normal(size) * spread + offset, of={"seed": seed})
        assert sampled(one).token_S[0] == np.argmax(one.logits + noise_of(one))


@pytest.mark.slow
@given(
    SIZES.flatmap(lambda size: st.lists(rows(size=size), min_size=2, max_size=7)),
    st.randoms(use_true_random=False),
)
@settings(max_examples=80, deadline=None)
def test_row_has_the_same_bits_alone_batched_and_permuted(batch, random):
    order = random.sample(range(len(batch)), len(batch))
    # Alone, a row that wants no raw log-probs gets None where the batch gives NaN: ask for them
    # everywhere.
    asked = [msgspec.structs.replace(row.sampling, raw_logprobs=True) for row in batch]
    batch = [dataclasses.replace(row, sampling=raw) for row, raw in zip(batch, asked, strict=True)]
    together, permuted = sampled(*batch), sampled(*(batch[i] for i in order))
    for place, i in enumerate(order):
        assert bits(sampled(batch[i]), 0) == bits(together, i) == bits(permuted, place)


@pytest.mark.slow
@given(rows(), st.integers(0, 6))
@settings(max_examples=150, deadline=None)
def test_draft_tokens_count_like_committed_ones(row, committed):
    tokens = row.output + row.path
    committed = min(committed, len(tokens))
    moved = dataclasses.replace(row, output=tokens[:committed], path=tokens[committed:])
    assert bits(sampled(row), 0) == bits(sampled(moved), 0)


def test_draft_path_leaves_the_token_counts_unchanged():
    state = row([0.0] * 4, of={"output": (0,)}, temperature=0.0, frequency_penalty=1.0).state()
    logits, at_root, on_path = torch.zeros(1, 4), np.array([2]), np.array([4])
    first = sample(logits, [state], np.zeros(1, np.int64), at_root, NO_PATH)
    sample(logits, [state], np.zeros(1, np.int64), on_path, np.array([[1, 2]], np.int32))
    again = sample(logits, [state], np.zeros(1, np.int64), at_root, NO_PATH)
    assert bits(first, 0) == bits(again, 0) and first.token_S[0] == 1


def test_min_tokens_masks_stop_tokens_only_until_reached():
    states = [{"output": (0,), "path": (1,) * depth, "eos": (2,)} for depth in range(4)]
    stops = {"min_tokens": 3, "stop_token_ids": (3,)}
    window = [row([0.0, 1.0, 9.0, 8.0], of=of, temperature=0.0, **stops) for of in states]
    assert sampled(*window).token_S.tolist() == [1, 1, 2, 2]


def test_min_tokens_leaves_eos_alone_under_ignore_eos():
    one = row([0.0, 1.0, 9.0], of={"eos": (2,)}, temperature=0.0, min_tokens=3, ignore_eos=True)
    assert sampled(one).token_S[0] == 2
    assert one.state().stop_ids == frozenset()


def test_stop_ids_are_eos_plus_those_of_the_request():
    one = row([0.0] * 8, of={"eos": (1, 2)}, stop_token_ids=(5,))
    assert one.state().stop_ids == {1, 2, 5}


def test_draft_path_and_position_must_agree_for_penalties():
    state = Row(np.zeros(4, np.float32), Sampling(presence_penalty=1.0)).state()
    with pytest.raises(AssertionError, match="path and position"):
        sample(torch.zeros(1, 4), [state], np.zeros(1, np.int64), np.array([5]), NO_PATH)


def test_ties_go_to_the_lowest_id():
    tied = [1.0, 7.0, 7.0, 7.0]
    greedy = row(tied, temperature=0.0, logprobs=3)
    assert sampled(greedy).token_S[0] == 1
    assert sampled(greedy).top[0].token_ids == (1, 2, 3)
    for seed in range(20):
        top_2 = row(tied, of={"seed": seed}, top_k=2, logprobs=4)
        assert sampled(top_2).top[0].token_ids == (1, 2)
        assert sampled(top_2).token_S[0] in (1, 2)
    # At 2^30 float32 has a grid of 64: the noise vanishes and every score ties.
    assert sampled(row([2.0**30] * 40)).token_S[0] == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("winner", [0, 20, 699])
def test_single_finite_logit_is_sampled_with_certainty(temperature, winner):
    logits = np.full(700, -np.inf, np.float32)
    logits[winner] = -123.0
    filters = {"top_p": 0.5, "top_k": 3, "min_p": 0.1}
    result = sampled(row(logits, of={"seed": 9}, temperature=temperature, logprobs=2, **filters))
    assert result.token_S[0] == winner and result.logprob_S[0] == 0
    assert result.top[0].token_ids == (winner,)


@pytest.mark.parametrize("broken", [[np.nan, 1.0], [-np.inf, -np.inf], [np.inf, 1.0]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_report_nan(broken, temperature):
    result = sampled(row(broken, temperature=temperature), row([0.0, 1.0]))
    assert np.isnan(result.logprob_S).tolist() == [True, False]


def test_extreme_logits_stay_finite():
    logits = [3e38, -3e38, 0.0, 2.9e38]
    result = sampled(row(logits, raw_logprobs=True), row(logits, temperature=0.0))
    assert result.token_S.tolist() == [0, 0] and result.logprob_S.tolist() == [0, 0]


def test_greedy_logprobs_are_at_temperature_one_unfiltered():
    one = row([0.0, 1.0, 2.0], temperature=0.0, top_k=1, top_p=0.1, logprobs=3)
    result, logprobs = sampled(one), reference.log_softmax(one.logits)
    np.testing.assert_allclose(result.logprob_S[0], logprobs[2], **LOGPROB_TOLERANCE)
    assert result.top[0].token_ids == (2, 1, 0)


def test_raw_logprobs_exist_only_for_rows_that_request_raw_ones():
    plain, raw = row([0.0, 1.0]), row([0.0, 1.0], raw_logprobs=True)
    assert sampled(plain).raw_logprob_S is None
    assert np.isnan(sampled(plain, raw).raw_logprob_S).tolist() == [True, False]


def test_rows_of_one_sequence_differ_only_by_position():
    state, positions = row([0.0] * 64, of={"seed": 4}).state(), np.arange(1, 9)
    paths = np.zeros((8, 0), np.int32)
    result = sample(torch.zeros(8, 64), [state], np.zeros(8, np.int64), positions, paths)
    noise = [np.argmax([gumbel(np.uint64(4), v, at) for v in range(64)]) for at in positions]
    assert result.token_S.tolist() == noise and len(set(noise)) > 4


def test_step_without_sampling_rows_samples_no_token():
    none = np.zeros(0, np.int64)
    result = sample(torch.zeros(0, 8), [], none, none, np.zeros((0, 0), np.int32))
    assert result.token_S.shape == (0,) and result.raw_logprob_S is None and result.top == []


def test_prompt_logprobs_list_the_prompt_token_then_the_best():
    logits = np.random.default_rng(0).standard_normal((5, 33)).astype(np.float32)
    targets = [0, 7, 32, 7, 1]
    result = prompt_logprobs(torch.from_numpy(logits), targets, 3)
    for row, target, entry in zip(logits, targets, result, strict=True):
        logprobs = reference.log_softmax(row)
        assert entry.token_ids == (target, *np.argsort(-row)[:3])
        expected = logprobs[[*entry.token_ids]]
        np.testing.assert_allclose(entry.logprobs, expected, **LOGPROB_TOLERANCE)
    without = prompt_logprobs(torch.from_numpy(logits), targets, 0)
    assert [entry.token_ids for entry in without] == [(t,) for t in targets]


def test_prompt_logprobs_have_the_bits_of_sampled_ones():
    logits = np.random.default_rng(1).standard_normal(130).astype(np.float32)
    result = sampled(row(logits, of={"seed": 3}, temperature=1.0, raw_logprobs=True))
    [scored] = prompt_logprobs(torch.from_numpy(logits[None]), [int(result.token_S[0])], 0)
    assert result.logprob_S[0] == result.raw_logprob_S[0] == np.float32(scored.logprobs[0])


def test_exponential_is_accurate_and_exact_at_zero():
    x = np.linspace(-86.9, 0.0, 20_001).astype(np.float32)
    fast = np.array([exp_nonpositive(value) for value in x], np.float64)
    # Cephes states 1e-7 relative; the last multiply-add and scaling round once more.
    np.testing.assert_allclose(fast, np.exp(x.astype(np.float64)), rtol=2.5e-7)
    assert exp_nonpositive(np.float32(0)) == 1 and exp_nonpositive(np.float32(-np.inf)) == 0
