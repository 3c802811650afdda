"""The noise is Philox-4x32-10, a pure function of (seed, token, position), equal to its slow twin,
and Gumbel distributed.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_kernels import reference
from tlt_kernels.cpu.noise import gumbel, gumbel_of_word, philox4x32

# Random123's published known answers (kat_vectors, philox 4x32 10): key, counter, words.
KNOWN_ANSWERS = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
words_32 = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("key, counter, words", KNOWN_ANSWERS)
def test_philox_gives_the_published_known_answers(key, counter, words):
    assert tuple(int(word) for word in philox4x32(*key, *counter)) == words
    assert tuple(int(word) for word in reference.philox4x32(key, counter)) == words


@given(words_32, words_32, words_32, words_32)
@settings(max_examples=200, deadline=None)
def test_philox_equals_its_twin(k0, k1, c0, c1):
    fast = [int(word) for word in philox4x32(k0, k1, c0, c1)]
    assert fast == [int(word) for word in reference.philox4x32((k0, k1), (c0, c1, 0, 0))]


@given(st.integers(0, 2**64 - 1), st.integers(0, 200_000), st.integers(0, 2**31))
@settings(max_examples=300, deadline=None)
def test_gumbel_equals_its_twin(seed, token, position):
    fast = np.float32(gumbel(np.uint64(seed), token, position))
    slow = reference.gumbel(seed, np.array([token]), position)[0]
    # One libm and numpy's logarithms may differ in the last place of float64: at most one float32
    # ulp after rounding. Near G = 0 the ulp shrinks with G while the error of log does not, hence
    # the absolute term.
    assert abs(float(fast) - float(slow)) <= max(abs(float(np.spacing(slow))), 1e-9)


def test_gumbel_is_bounded_at_the_extreme_words():
    highest, lowest = gumbel_of_word(np.uint32(0)), gumbel_of_word(np.uint32(2**32 - 1))
    assert highest == np.float32(-math.log(-math.log1p(-(2.0**-33))))
    assert lowest == np.float32(-math.log(24 * math.log(2.0)))


def test_seed_token_and_position_each_change_the_noise():
    base = gumbel(np.uint64(5), 7, 11)
    assert gumbel(np.uint64(5), 7, 11) == base
    for seed, token, position in [(5 + 2**32, 7, 11), (6, 7, 11), (5, 6, 11), (5, 7, 12)]:
        assert gumbel(np.uint64(seed), token, position) != base


def test_sampling_noise_has_the_moments_of_a_standard_gumbel():
    sample = reference.gumbel(123, np.arange(100_000), 9).astype(np.float64)
    # Mean: Euler's constant, standard error 1.2825 / sqrt(1e5) = 0.004. Variance: pi^2 / 6,
    # standard error about 0.011 (kurtosis 5.4). Five standard errors each.
    assert abs(sample.mean() - 0.5772157) < 0.021
    assert abs(sample.var() - math.pi**2 / 6) < 0.055
