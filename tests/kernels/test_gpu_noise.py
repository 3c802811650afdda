"""The GPU's noise against the float64 reference."""

from __future__ import annotations

from tests.kernels.triton_tests import DEVICE, assert_same_bits, gpu  # isort: skip  # before triton: it chooses the interpreter

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tlt_kernels import reference as twin
from tlt_kernels.gpu import noise

SEEDS = [0, 1, 2**31, 2**32 - 1, 2**32, 0x0123456789ABCDEF, 2**63 - 1]


@triton.jit
def _words(quad_N, out_4N, key_0, key_1, position, N: tl.constexpr):
    lanes = tl.arange(0, N)
    quads = tl.load(quad_N + lanes).to(tl.uint32)
    keys_0 = tl.zeros_like(quads) + key_0.to(tl.uint32)
    keys_1 = tl.zeros_like(quads) + key_1.to(tl.uint32)
    w0, w1, w2, w3 = noise.philox4x32(keys_0, keys_1, quads, position.to(tl.uint32))
    tl.store(out_4N + lanes, w0.to(tl.int64))
    tl.store(out_4N + N + lanes, w1.to(tl.int64))
    tl.store(out_4N + 2 * N + lanes, w2.to(tl.int64))
    tl.store(out_4N + 3 * N + lanes, w3.to(tl.int64))


@triton.jit
def _gumbel_of_words(word_N, out_N, N: tl.constexpr):
    lanes = tl.arange(0, N)
    tl.store(out_N + lanes, noise.gumbel_of_word(tl.load(word_N + lanes).to(tl.uint32)))


@triton.jit
def _both_ways(seed_Q, position_Q, quads_4N, tokens_4N, above_4N, first, N: tl.constexpr):
    seed, position = tl.load(seed_Q), tl.load(position_Q)
    lanes = tl.arange(0, 4 * N)
    tl.store(tokens_4N + lanes, noise.gumbel_of_tokens(seed, first + lanes, position))
    words = noise.words_of_quads(seed, first, position, N)
    for lane in tl.static_range(4):
        tl.store(quads_4N + 4 * tl.arange(0, N) + lane, noise.gumbel_of_word(words[lane]))
        tl.store(above_4N + 4 * tl.arange(0, N) + lane, noise.gumbel_above(words[lane]))


def both_ways(seed: int, position: int, first: int, size: int) -> torch.Tensor:
    """Return [3, size]: G by quads, G token by token, and the bound of G."""
    signed = seed - 2**64 if seed >= 2**63 else seed
    seed_Q = torch.tensor([signed], dtype=torch.int64, device=DEVICE)
    position_Q = torch.tensor([position], dtype=torch.int32, device=DEVICE)
    found = torch.full((3, size), float("nan"), device=DEVICE)
    _both_ways[(1,)](seed_Q, position_Q, *found, first, N=size // 4)
    return found.cpu()


def error_in_ulps(found: np.ndarray, exact: np.ndarray) -> float:
    """Return the largest error in units in the last place of max(|G|, 1)."""
    return float(
        (np.abs(found - exact) / np.spacing(np.maximum(np.abs(exact), 1).astype(np.float32))).max()
    )


def exact_gumbel(words: np.ndarray) -> np.ndarray:
    u = np.minimum((words.astype(np.float64) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -np.log(-np.log1p(-u))


def gumbel_of_words(words: np.ndarray) -> np.ndarray:
    word_N = torch.from_numpy(words.astype(np.int64)).to(DEVICE)
    out_N = torch.full((len(words),), float("nan"), device=DEVICE)
    _gumbel_of_words[(1,)](word_N, out_N, N=len(words))
    return out_N.cpu().numpy()


@pytest.mark.parametrize("key", [(0, 0), (0xA4093822, 0x299F31D0), (0xFFFFFFFF, 0xFFFFFFFF)])
def test_philox_words_equal_the_reference(key):
    quads = np.array([0, 1, 2, 0x243F6A88, 2**31 - 1, 38015, 77, 2**31 - 2], np.int64)
    out = torch.full((4, 8), -1, dtype=torch.int64, device=DEVICE)
    _words[(1,)](torch.from_numpy(quads).to(DEVICE), out, *key, 5, N=8)
    expected = np.stack(twin.philox4x32(key, (quads, 5, 0, 0))).astype(np.int64)
    np.testing.assert_array_equal(out.cpu().numpy(), expected)


def test_gumbel_is_accurate_over_the_whole_range_of_words():
    edges = [*range(4), 0x55555554, 0x55555555, 0x55555556, *(2**32 - k for k in range(1, 5))]
    one = int(2**32 * (1 - np.exp(-1)))  # G crosses zero here
    powers = np.array([2**k + d for k in range(2, 32) for d in (-1, 0, 1)])
    random = np.random.default_rng(0).integers(0, 2**32, 8192 - len(edges) - len(powers) - 256)
    words = np.concatenate([edges, powers, np.arange(one - 128, one + 128), random])
    found, exact = gumbel_of_words(words), exact_gumbel(words)
    assert error_in_ulps(found, exact) < 2.5
    relative = np.abs(found / exact - 1)[np.abs(exact) > 0.1]
    assert relative.max() < 1.5e-6  # 2^-23 absolute at |G| = 0.1


@pytest.mark.parametrize("seed", [*SEEDS, 2**64 - 1, 2**63])
def test_gumbel_of_quads_and_single_tokens_equals_the_reference(seed):
    for position, first in ((0, 0), (1, 4), (40_000, 151_040)):
        quads, tokens, above = both_ways(seed, position, first, 64)
        assert_same_bits("G of quads", quads, tokens)
        exact = twin.gumbel(seed, np.arange(first, first + 64), position).astype(np.float64)
        assert error_in_ulps(quads.numpy(), exact) < 3.0
        assert (above >= quads - 1e-4).all()


@gpu
def test_gumbel_on_the_gpu_is_accurate_over_many_words():
    words = np.random.default_rng(1).integers(0, 2**32, (64, 16384))
    words[0] = np.arange(16384)
    words[1] = 2**32 - 1 - np.arange(16384)
    for row in words:
        assert error_in_ulps(gumbel_of_words(row), exact_gumbel(row)) < 2.5
