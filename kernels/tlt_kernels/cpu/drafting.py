"""Children of draft-tree nodes, ranked with the noise that the target will sample with.

z_v = q_v / T + G(seed, position, v) over the draft vocabulary, G keyed by the *target* id;
temperature 0 is z = q. Only differences of z are used, so logits serve as well as
log-probabilities. Most of a large vocabulary is rejected before a logarithm: G > t needs a Philox
word below a tabulated bound, and no G exceeds 22.9. Slow twin: `tests/unit/test_drafters.py`.

Legend: R rows, V draft vocabulary, W children per row.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from tlt_kernels.cpu.noise import gumbel_of_word, philox4x32, split_seed

GUMBEL_LOW, GUMBEL_HIGH = -3.0, 23.0  # every G lies strictly between
STEPS = 16  # table entries per nat
SLACK = 1e-3  # covers float32 rounding of z


def _word_bounds() -> np.ndarray:
    """Return bounds such that G(word) > GUMBEL_LOW + i / STEPS only for word < bounds[i] (uint64;
    one word of slack).
    """
    edge = GUMBEL_LOW + np.arange(int((GUMBEL_HIGH - GUMBEL_LOW) * STEPS) + 1) / STEPS
    uniform = -np.expm1(-np.exp(-edge))
    return np.minimum(np.ceil(uniform * 2.0**32) + 1, 2.0**32).astype(np.uint64)


WORD_BOUNDS = _word_bounds()


@njit(cache=True)
def best_children(logit_V, target_id_V, seed, position, temperature, token_W, z_W):
    """Fill token_W (target ids) and z_W with the best by z, best first. Ties keep the earlier
    index. Return their number.
    """
    width = len(token_W)
    found = 0
    noisy = temperature > 0
    scale = np.float32(1.0) / np.float32(temperature) if noisy else np.float32(1.0)
    k0, k1 = split_seed(seed)
    block = np.int64(-1)
    x0, x1, x2, x3 = np.uint32(0), np.uint32(0), np.uint32(0), np.uint32(0)
    for v in range(len(logit_V)):
        z = logit_V[v] * scale
        full = found == width
        if noisy:
            index = 0
            if full:
                missing = z_W[width - 1] - z - SLACK
                if missing > GUMBEL_HIGH:
                    continue
                index = max(0, int((missing - GUMBEL_LOW) * STEPS))
            token = target_id_V[v]
            if token >> 2 != block:
                block = token >> 2
                x0, x1, x2, x3 = philox4x32(k0, k1, np.uint32(block), np.uint32(position))
            lane = token & 3
            word = x0 if lane == 0 else x1 if lane == 1 else x2 if lane == 2 else x3
            if np.uint64(word) > WORD_BOUNDS[index]:
                continue
            z += gumbel_of_word(word)
        if full and not z > z_W[width - 1]:
            continue
        if not full:
            found += 1
        at = found - 1
        while at > 0 and z > z_W[at - 1]:
            z_W[at] = z_W[at - 1]
            token_W[at] = token_W[at - 1]
            at -= 1
        z_W[at] = z
        token_W[at] = target_id_V[v]
    return found


@njit(cache=True)
def children(logit_RV, target_id_V, seed_R, position_R, temperature_R, token_RW, z_RW):
    """Find `best_children` of every row. Missing ones get token -1 and z = -inf."""
    for r in range(len(logit_RV)):
        found = best_children(
            logit_RV[r],
            target_id_V,
            seed_R[r],
            position_R[r],
            temperature_R[r],
            token_RW[r],
            z_RW[r],
        )
        token_RW[r, found:] = -1
        z_RW[r, found:] = -math.inf


@njit(cache=True)
def calibration_cell(phase, rank, gap, edges):
    """Return the index into the flattened [2 phases, 8 ranks, 16 gap buckets] table. A bucket is
    the number of edges below the gap.
    """
    bucket = 0
    while bucket < len(edges) and gap > edges[bucket]:
        bucket += 1
    return (phase * 8 + min(rank, 7)) * 16 + bucket
