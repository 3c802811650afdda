"""Paged tree attention: per (row, KV head), chunks of 64 absolute key positions, merged in chunk order.

Called by the `cpu` attention backend. A row's bits depend on its own query, position and visible keys only: one
compiled function handles every row, and what it does next depends on nothing but the row's position. A key is found
through the row's own slots, so a draft ancestor stands where it will stand once it is committed.

Threads: the kernel is single-threaded and releases the GIL; large calls are cut by rows over a small pool of Python threads.
numba's own parallel loops are not used: their worker threads and torch's OpenMP workers, which spin for a while after
each matrix product, evict each other when there are as many of both as cores.

Legend: R rows, N query heads, K KV heads, G = N / K heads of one KV head, D head width, S slots, B requests, P pages.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tlt_kernels.cpu.exponential import exp

CHUNK = 64  # key positions per softmax chunk
_DOT = {"reassoc", "contract", "nsz"}  # vectorised sums; NaN and infinity keep their meaning
_ZERO, _ONE, _MINUS_INFINITY = np.float32(0.0), np.float32(1.0), np.float32(-np.inf)


@njit(cache=True, fastmath=_DOT, error_model="numpy")
def _scores(q_RND, r, head, group, k_SKD, kv_head, slot_C, scale, score_GC):
    """Scaled dot products of `group` heads with the chunk's 64 slots, four keys at a time."""
    width = k_SKD.shape[2]
    for c in range(0, CHUNK, 4):
        k0, k1 = k_SKD[slot_C[c], kv_head], k_SKD[slot_C[c + 1], kv_head]
        k2, k3 = k_SKD[slot_C[c + 2], kv_head], k_SKD[slot_C[c + 3], kv_head]
        for g in range(group):
            q = q_RND[r, head + g]
            s0, s1, s2, s3 = _ZERO, _ZERO, _ZERO, _ZERO
            for d in range(width):
                s0 += q[d] * k0[d]
                s1 += q[d] * k1[d]
                s2 += q[d] * k2[d]
                s3 += q[d] * k3[d]
            score_GC[g, c], score_GC[g, c + 1] = s0 * scale, s1 * scale
            score_GC[g, c + 2], score_GC[g, c + 3] = s2 * scale, s3 * scale


@njit(cache=True, fastmath={"contract"}, error_model="numpy")
def _weigh(score_GC, group, begin, end, top_G, sum_G):
    """Scores of lanes [begin, end) become exp(score - maximum), the other lanes 0."""
    for g in range(group):
        top = _MINUS_INFINITY
        for c in range(begin, end):
            top = score_GC[g, c] if score_GC[g, c] > top else top
        for c in range(CHUNK):
            score_GC[g, c] = exp(score_GC[g, c] - top)
        score_GC[g, :begin] = _ZERO
        score_GC[g, end:] = _ZERO
        total = _ZERO
        for c in range(CHUNK):
            total += score_GC[g, c]
        top_G[g], sum_G[g] = top, total


@njit(cache=True, fastmath={"contract"}, error_model="numpy")
def _accumulate(score_GC, group, v_SKD, kv_head, slot_C, acc_GD):
    """Weighted sum of the chunk's values, four keys at a time."""
    width = v_SKD.shape[2]
    acc_GD[:group] = _ZERO
    for c in range(0, CHUNK, 4):
        v0, v1 = v_SKD[slot_C[c], kv_head], v_SKD[slot_C[c + 1], kv_head]
        v2, v3 = v_SKD[slot_C[c + 2], kv_head], v_SKD[slot_C[c + 3], kv_head]
        for g in range(group):
            w0, w1, w2, w3 = score_GC[g, c], score_GC[g, c + 1], score_GC[g, c + 2], score_GC[g, c + 3]
            for d in range(width):
                acc_GD[g, d] += w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d]


@njit(
    "void(f4[:, :, ::1], f4[:, :, ::1], f4[:, :, ::1], i8[::1], i4[::1], i4[::1], i4[:, ::1], i4[:, ::1],"
    " i8, i8, f4, f4[:, :, ::1], i8, i8)",
    cache=True, fastmath={"contract"}, error_model="numpy", nogil=True,
)
def attend_rows(q_RND, k_SKD, v_SKD, position_R, request_R, base_B, page_table_BP, path_RD, page_size, first, scale, out_RND, start, stop):
    """Write `out_RND[start:stop]`. Row r sees key positions [first, position_R[r]]; with none to see it gets zeros.

    Lanes of a chunk outside that range point at a visible slot and weigh 0, so nothing invisible is ever read.
    """
    kv_heads, width = k_SKD.shape[1], k_SKD.shape[2]
    group = q_RND.shape[1] // kv_heads
    slot_C = np.empty(CHUNK, np.int64)
    score_GC = np.empty((group, CHUNK), np.float32)
    acc_GD = np.empty((group, width), np.float32)
    top_G, sum_G = np.empty(group, np.float32), np.empty(group, np.float32)
    best_G, total_G = np.empty(group, np.float32), np.empty(group, np.float32)
    for r in range(start, stop):
        last, b = position_R[r], request_R[r]
        base = base_B[b]
        if last < first:
            out_RND[r] = _ZERO
            continue
        for kv_head in range(kv_heads):
            head = kv_head * group
            for chunk in range(first // CHUNK, last // CHUNK + 1):
                origin = chunk * CHUNK
                begin, end = max(first - origin, 0), min(last - origin + 1, CHUNK)
                for c in range(begin, end):
                    p = origin + c
                    if p < base:
                        slot_C[c] = page_table_BP[b, p // page_size] * page_size + p % page_size
                    else:
                        slot_C[c] = path_RD[r, p - base]
                slot_C[:begin] = slot_C[begin]
                slot_C[end:] = slot_C[begin]
                _scores(q_RND, r, head, group, k_SKD, kv_head, slot_C, scale, score_GC)
                _weigh(score_GC, group, begin, end, top_G, sum_G)
                _accumulate(score_GC, group, v_SKD, kv_head, slot_C, acc_GD)
                for g in range(group):
                    if chunk == first // CHUNK:
                        best_G[g], total_G[g] = top_G[g], sum_G[g]
                        out_RND[r, head + g] = acc_GD[g]
                        continue
                    best = max(best_G[g], top_G[g])
                    old, new = exp(best_G[g] - best), exp(top_G[g] - best)
                    best_G[g], total_G[g] = best, total_G[g] * old + sum_G[g] * new
                    for d in range(width):
                        out_RND[r, head + g, d] = out_RND[r, head + g, d] * old + acc_GD[g, d] * new
            for g in range(group):
                inverse = _ONE / total_G[g]
                for d in range(width):
                    out_RND[r, head + g, d] *= inverse
