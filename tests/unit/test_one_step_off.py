"""One-step-off sampling: strata, weights and the split by prompt."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.recorded_samples import sample
from tlt_server.samples.sample import Sample
from tlt_server.samples.segments import Recorded
from tlt_server.trainer.judging.adoption_test import AdoptionTest
from tlt_server.trainer.recording.sampling import (
    Stratum,
    draw,
    evaluated,
    held_out,
    judging,
    strata_of,
    weights_of,
)

LENGTHS = (1, 3, 8, 20, 60)
some = st.lists(
    st.builds(
        sample,
        st.integers(0, 40),
        st.integers(0, 3),
        version=st.sampled_from(["v0", "v1", "v2"]),
        output=st.sampled_from(LENGTHS),
        accepted=st.integers(0, 3),
    ),
    max_size=40,
)


def kept(samples: list[Sample]) -> list[Recorded]:
    return [Recorded(number, each, 100) for number, each in enumerate(samples)]


@pytest.mark.slow
@given(some, st.integers(0, 2**32))
def test_held_out_prompts_and_older_steps_are_never_drawn(samples: list[Sample], seed: int) -> None:
    entries = kept(samples)
    newest = list(dict.fromkeys(version for each in samples for _, version in each.spans))[-2:]
    strata = strata_of(entries, newest[-1] if newest else "v0")
    drawn = draw(strata, 50, seed, 3)
    out = {each.prompt_key for each in samples if held_out(each)}
    assert not out & {entry.sample.prompt_key for entry in drawn}
    assert {entry.sample.version for entry in drawn} <= set(newest)
    assert drawn == draw(strata, 50, seed, 3)
    trained = any(not held_out(e.sample) and e.sample.version == newest[-1] for e in entries)
    assert len(drawn) == 50 or not trained
    for version in newest:
        for entry in evaluated(entries, version):
            assert entry.sample.prompt_key in out and entry.sample.version == version


@pytest.mark.slow
def test_tenth_of_prompts_is_held_out_with_all_responses() -> None:
    prompts = range(2000)
    out = [held_out(sample(prompt)) for prompt in prompts]
    assert 0.08 < sum(out) / len(out) < 0.12
    assert out == [held_out(sample(prompt, seed=5, version="later")) for prompt in prompts]


def test_sequence_begun_elsewhere_is_trained_on_and_never_judged() -> None:
    whole = [sample(prompt, output=8) for prompt in range(50)]
    moved = [msgspec.structs.replace(each, spans=[(3, "v0")], first_root=7) for each in whole]
    assert len(evaluated(kept(whole), "v0")) > 0 == len(evaluated(kept(moved), "v0"))
    (trained,) = strata_of(kept(moved), "v0").values()
    assert len(trained) == 50 - len(evaluated(kept(whole), "v0"))


def test_longest_responses_of_the_last_step_stay_until_replaced() -> None:
    prompts = [prompt for prompt in range(200) if not held_out(sample(prompt))][:60]
    before = [sample(p, version="v0", output=length) for p in prompts[:10] for length in LENGTHS]
    short = [sample(p, version="v1", output=length) for p in prompts[:20] for length in (1, 3)]
    strata = strata_of(kept(before + short), "v1")
    lengths = [length.bit_length() - 1 for length in LENGTHS]
    assert [*strata] == [
        *(Stratum(0, length) for length in lengths[:2]),
        *(Stratum(1, length) for length in lengths[2:]),
    ]
    long = [sample(p, version="v1", output=60) for p in prompts[:10]]
    strata = strata_of(kept(before + short + long), "v1")
    assert Stratum(1, lengths[-1]) not in strata and Stratum(1, lengths[-2]) in strata
    later = [sample(p, version="v2", output=3) for p in prompts[:2]]
    strata = strata_of(kept(before + short + long + later), "v2")
    assert {stratum.step for stratum in strata} == {0, 1}


def test_samples_are_weighted_from_the_active_version() -> None:
    prompts = [prompt for prompt in range(100) if not held_out(sample(prompt))][:20]
    first = [sample(p, version="v0") for p in prompts[:10]]
    second = [sample(p, version="v1") for p in prompts]
    for in_force in ("v0", "v1"):
        strata = strata_of(kept(first + second), in_force)
        assert {e.sample.version for e in strata[Stratum(0, 3)]} == {in_force}
    assert {s.step for s in strata_of(kept(first + second), "just-pushed")} == {0}


@pytest.mark.slow
def test_flood_from_one_key_leaves_other_keys_their_share() -> None:
    flood = [sample(prompt, owner="flood", accepted=0) for prompt in range(1000, 4000)]
    prompts = [sample(prompt, owner="own", accepted=3) for prompt in range(600)]
    strata = strata_of(kept(prompts + flood), "v0")
    drawn = Counter(entry.sample.owner for entry in draw(strata, 2000, 1, 0))
    assert drawn["own"] / 2000 == pytest.approx(0.5, abs=0.04)
    groups = judging(evaluated(kept(prompts + flood), "v0"), 60)
    assert Counter(group[0].sample.owner for group in groups) == {"own": 30, "flood": 30}


@pytest.mark.slow
def test_gain_on_one_keys_flood_alone_is_refused() -> None:
    """The loss on the prompts of the other key is as large as the gain on random ones."""
    flood = [sample(prompt, owner="flood") for prompt in range(1000, 9000)]
    own = [sample(prompt, owner="own") for prompt in range(3000)]
    held, found = evaluated(kept(own + flood), "v0"), []
    for groups in (judging(held, 256), [[entry] for entry in held[-256:]]):
        test = AdoptionTest()
        for [entry] in groups:
            after = 90.0 if entry.sample.owner == "flood" else 110.0
            test.observe(np.array([100.0]), np.array([after]), np.zeros(1, np.int32))
            if test.better:
                break
        found.append(test.better)
    assert found == [False, True]


def test_strata_are_drawn_evenly_and_sequences_by_failed_drafts() -> None:
    prompts = [prompt for prompt in range(100) if not held_out(sample(prompt))]
    poor, good = sample(prompts[0], output=8, accepted=1), sample(prompts[1], output=8, accepted=3)
    assert (poor.failures, good.failures) == (3, 0)
    many = [sample(prompt, output=60, accepted=3) for prompt in prompts[2:30]]
    strata = strata_of(kept([poor, good, *many]), "v0")
    assert weights_of(strata[Stratum(0, 3)]) == [4 / 5, 1 / 5]
    count = Counter(entry.number for entry in draw(strata, 20_000, 1, 0))
    assert count[0] / 20_000 == pytest.approx(0.4, abs=0.02)
    assert count[1] / 20_000 == pytest.approx(0.1, abs=0.02)
    assert draw(strata, 50, 1, 0) != draw(strata, 50, 1, 1)


def test_empty_buffer_yields_no_sample() -> None:
    assert draw(strata_of([], "v0"), 5, 0, 0) == []
