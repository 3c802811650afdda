"""top_k and top_p on the CPU: a pass over bins of equal width finds the bin with the cut, and only
that bin is sorted. `sampling.py` calls both and has the definitions.

Legend: V vocabulary; z_V logits over temperature, w_V = exp(z_V - top).
"""

from __future__ import annotations

import numpy as np
from numba import njit

BINS = 1024
BINS_PER_NAT = np.float32(16)


@njit(cache=True, forceinline=True)
def bin_of(z, top):
    """Return the index of z among bins of equal width below the maximum. Smaller z never have
    smaller indices.
    """
    return np.int32(min((top - z) * BINS_PER_NAT, np.float32(BINS - 1)))


@njit(cache=True, forceinline=True)
def drop(v, z_V, w_V):
    z_V[v] = np.float32(-np.inf)
    w_V[v] = np.float32(0)


@njit(cache=True)
def drop_after(crossing, ids, kept_of_ids, top, z_V, w_V):
    """Drop every bin after the crossing one and, in the crossing bin, all sorted `ids` except the
    first `kept_of_ids`.
    """
    for v in range(z_V.shape[0]):
        if z_V[v] != -np.inf and bin_of(z_V[v], top) > crossing:
            drop(v, z_V, w_V)
    for i in range(kept_of_ids, ids.shape[0]):
        drop(ids[i], z_V, w_V)


@njit(cache=True)
def sorted_bin(crossing, top, z_V):
    """Return the ids of one bin by descending z, ties by ascending id."""
    members = np.empty(z_V.shape[0], np.int64)
    count = 0
    for v in range(z_V.shape[0]):
        if z_V[v] != -np.inf and bin_of(z_V[v], top) == crossing:
            members[count] = v
            count += 1
    members = members[:count]
    return members[np.argsort(-z_V[members], kind="mergesort")]


@njit(cache=True)
def keep_top_k(top_k, top, z_V, w_V):
    """Keep the k largest: whole bins until one crosses k, then sort that bin only."""
    counts = np.zeros(BINS, np.int64)
    for v in range(z_V.shape[0]):
        if z_V[v] != -np.inf:
            counts[bin_of(z_V[v], top)] += 1
    kept = 0
    for crossing in range(BINS):
        if kept + counts[crossing] > top_k:
            drop_after(crossing, sorted_bin(crossing, top, z_V), top_k - kept, top, z_V, w_V)
            return
        kept += counts[crossing]


@njit(cache=True)
def keep_top_p(top_p, top, z_V, w_V):
    """Keep the smallest sorted set of mass >= top_p: whole bins until one crosses, then sort that
    bin only.
    """
    masses = np.zeros(BINS, np.float64)
    for v in range(z_V.shape[0]):
        if z_V[v] != -np.inf:
            masses[bin_of(z_V[v], top)] += np.float64(w_V[v])
    target = top_p * masses.sum()
    mass = 0.0
    for crossing in range(BINS):
        if mass + masses[crossing] >= target:
            ids = sorted_bin(crossing, top, z_V)
            kept = 0
            while kept < ids.shape[0] and (kept == 0 or mass < target):
                mass += np.float64(w_V[ids[kept]])
                kept += 1
            drop_after(crossing, ids, kept, top, z_V, w_V)
            return
        mass += masses[crossing]
