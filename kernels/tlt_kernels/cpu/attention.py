"""Paged tree attention: per (row, KV head), chunks of 64 absolute key positions, merged in chunk order.

Called by the `cpu` attention backend. A row's bits depend on its own query, position and visible keys only: one
compiled function handles every row, and what it does next depends on nothing but the row's position. A key is found
through the row's own slots, so a draft ancestor stands where it will stand once it is committed.

Threads: the kernel is single-threaded and releases the GIL; the backend cuts large calls by rows over a small pool of
Python threads. numba's parallel loops are not used: they would compile the row a second time, with bits of its own, and
bring a third pool of workers beside torch's OpenMP. Measured between torch products on two busy cores, 64 rows of 640
keys, median of the whole: 1.7 to 2.0 ms by this pool, 1.7 to 3.4 by numba's omp and workqueue layers, 1.6 to 2.3 single-threaded.

Legend: R rows, N query heads, K KV heads, G = N / K heads of one KV head, D head width, S slots, B requests, P pages.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tlt_kernels.cpu.exponential import exp

CHUNK = 64  # key positions per softmax chunk
_LANES = 16
_DOT = {"reassoc", "contract", "nsz"}  # vectorised sums; NaN and infinity keep their meaning
_ZERO, _ONE, _MINUS_INFINITY = np.float32(0.0), np.float32(1.0), np.float32(-np.inf)
_LOWEST = np.float32(-3.0e38)  # the running maximum before the first chunk, whose sum and output are 0


@njit(cache=True, error_model="numpy")
def _find_slots(r, b, origin, begin, end, base, page_table_BP, path_RD, page_size, slot_C):
    """Slots of positions origin + [begin, end); the other lanes repeat the first of them."""
    page, offset = (origin + begin) // page_size, (origin + begin) % page_size
    for c in range(begin, end):
        if origin + c < base:
            slot_C[c] = page_table_BP[b, page] * page_size + offset
        else:
            slot_C[c] = path_RD[r, origin + c - base]
        offset += 1
        if offset == page_size:
            page, offset = page + 1, 0
    for c in range(begin):
        slot_C[c] = slot_C[begin]
    for c in range(end, CHUNK):
        slot_C[c] = slot_C[begin]


@njit(cache=True, fastmath=_DOT, error_model="numpy")
def _scores(q_RND, r, head, group, k_SKD, kv_head, slot_C, scale, score_GC):
    """Scaled dot products of `group` heads with the chunk's 64 keys, two heads by four keys at a time to share their loads."""
    width, h = k_SKD.shape[2], kv_head
    for c in range(0, CHUNK, 4):
        k0, k1, k2, k3 = slot_C[c], slot_C[c + 1], slot_C[c + 2], slot_C[c + 3]
        for g in range(0, group, 2):
            n, m = head + g, head + min(g + 1, group - 1)  # an odd last head is its own partner
            s0, s1, s2, s3 = _ZERO, _ZERO, _ZERO, _ZERO
            t0, t1, t2, t3 = _ZERO, _ZERO, _ZERO, _ZERO
            for d in range(width):
                s0 += q_RND[r, n, d] * k_SKD[k0, h, d]
                s1 += q_RND[r, n, d] * k_SKD[k1, h, d]
                s2 += q_RND[r, n, d] * k_SKD[k2, h, d]
                s3 += q_RND[r, n, d] * k_SKD[k3, h, d]
                t0 += q_RND[r, m, d] * k_SKD[k0, h, d]
                t1 += q_RND[r, m, d] * k_SKD[k1, h, d]
                t2 += q_RND[r, m, d] * k_SKD[k2, h, d]
                t3 += q_RND[r, m, d] * k_SKD[k3, h, d]
            score_GC[g, c], score_GC[g, c + 1] = s0 * scale, s1 * scale
            score_GC[g, c + 2], score_GC[g, c + 3] = s2 * scale, s3 * scale
            score_GC[g + 1, c], score_GC[g + 1, c + 1] = t0 * scale, t1 * scale
            score_GC[g + 1, c + 2], score_GC[g + 1, c + 3] = t2 * scale, t3 * scale


@njit(cache=True, fastmath={"contract"}, error_model="numpy")
def _weigh(score_GC, group, begin, end, lane_L, top_G, sum_G):
    """Scores of lanes [begin, end) become exp(score - maximum), the other lanes 0.

    Maximum and sum run over 16 interleaved lanes first: vectorised, and in one fixed order.
    """
    for g in range(group):
        for c in range(begin):
            score_GC[g, c] = _MINUS_INFINITY
        for c in range(end, CHUNK):
            score_GC[g, c] = _MINUS_INFINITY
        for i in range(_LANES):
            lane_L[i] = score_GC[g, i]
        for c in range(_LANES, CHUNK, _LANES):
            for i in range(_LANES):
                lane_L[i] = score_GC[g, c + i] if score_GC[g, c + i] > lane_L[i] else lane_L[i]
        top = lane_L[0]
        for i in range(_LANES):
            top = lane_L[i] if lane_L[i] > top else top
        for c in range(CHUNK):
            score_GC[g, c] = exp(score_GC[g, c] - top)
        for c in range(begin):
            score_GC[g, c] = _ZERO
        for c in range(end, CHUNK):
            score_GC[g, c] = _ZERO
        for i in range(_LANES):
            lane_L[i] = score_GC[g, i]
        for c in range(_LANES, CHUNK, _LANES):
            for i in range(_LANES):
                lane_L[i] += score_GC[g, c + i]
        total = _ZERO
        for i in range(_LANES):
            total += lane_L[i]
        top_G[g], sum_G[g] = top, total


@njit(cache=True, fastmath={"contract"}, error_model="numpy")
def _accumulate(score_GC, group, v_SKD, kv_head, slot_C, acc_GD):
    """Weighted sum of the chunk's values, two heads by eight keys at a time; of an odd number, the last partner's row is waste."""
    width, h = v_SKD.shape[2], kv_head
    for g in range(acc_GD.shape[0]):
        for d in range(width):
            acc_GD[g, d] = _ZERO
    for c in range(0, CHUNK, 8):
        v0, v1, v2, v3 = slot_C[c], slot_C[c + 1], slot_C[c + 2], slot_C[c + 3]
        v4, v5, v6, v7 = slot_C[c + 4], slot_C[c + 5], slot_C[c + 6], slot_C[c + 7]
        for g in range(0, group, 2):
            s0, s1, s2, s3 = score_GC[g, c], score_GC[g, c + 1], score_GC[g, c + 2], score_GC[g, c + 3]
            s4, s5, s6, s7 = score_GC[g, c + 4], score_GC[g, c + 5], score_GC[g, c + 6], score_GC[g, c + 7]
            t0, t1, t2, t3 = score_GC[g + 1, c], score_GC[g + 1, c + 1], score_GC[g + 1, c + 2], score_GC[g + 1, c + 3]
            t4, t5, t6, t7 = score_GC[g + 1, c + 4], score_GC[g + 1, c + 5], score_GC[g + 1, c + 6], score_GC[g + 1, c + 7]
            for d in range(width):
                x0, x1, x2, x3 = v_SKD[v0, h, d], v_SKD[v1, h, d], v_SKD[v2, h, d], v_SKD[v3, h, d]
                x4, x5, x6, x7 = v_SKD[v4, h, d], v_SKD[v5, h, d], v_SKD[v6, h, d], v_SKD[v7, h, d]
                s = acc_GD[g, d] + s0 * x0 + s1 * x1 + s2 * x2 + s3 * x3 + s4 * x4 + s5 * x5 + s6 * x6 + s7 * x7
                t = acc_GD[g + 1, d] + t0 * x0 + t1 * x1 + t2 * x2 + t3 * x3 + t4 * x4 + t5 * x5 + t6 * x6 + t7 * x7
                acc_GD[g, d], acc_GD[g + 1, d] = s, t


@njit(cache=True, fastmath={"contract"}, error_model="numpy")
def _merge(out_RND, r, head, group, acc_GD, top_G, sum_G, best_N, total_N):
    """Fold the next chunk into the running maximum, sum and output of `group` heads."""
    for g in range(group):
        n = head + g
        best = max(best_N[n], top_G[g])
        old, new = exp(best_N[n] - best), exp(top_G[g] - best)
        best_N[n], total_N[n] = best, total_N[n] * old + sum_G[g] * new
        for d in range(acc_GD.shape[1]):
            out_RND[r, n, d] = out_RND[r, n, d] * old + acc_GD[g, d] * new


@njit(
    "void(f4[:, :, ::1], f4[:, :, ::1], f4[:, :, ::1], i8[::1], i4[::1], i4[::1], i4[:, ::1], i4[:, ::1],"
    " i8, i8, f4, f4[:, :, ::1], i8, i8)",
    cache=True, fastmath={"contract"}, error_model="numpy", nogil=True,
)
def attend_rows(q_RND, k_SKD, v_SKD, position_R, request_R, base_B, page_table_BP, path_RD, page_size, first, scale, out_RND, start, stop):
    """Write `out_RND[start:stop]`. Row r sees key positions [first, position_R[r]]; with none to see it gets zeros.

    Lanes of a chunk outside that range point at a visible slot and weigh 0, so nothing invisible is ever read.
    """
    heads, kv_heads, width = q_RND.shape[1], k_SKD.shape[1], k_SKD.shape[2]
    group = heads // kv_heads
    slot_C = np.empty(CHUNK, np.int64)
    score_GC = np.empty((group + group % 2, CHUNK), np.float32)
    acc_GD = np.empty((group + group % 2, width), np.float32)
    lane_L = np.empty(_LANES, np.float32)
    top_G, sum_G = np.empty(group, np.float32), np.empty(group, np.float32)
    best_N, total_N = np.empty(heads, np.float32), np.empty(heads, np.float32)
    for r in range(start, stop):
        last, b = position_R[r], request_R[r]
        for n in range(heads):
            best_N[n], total_N[n] = _LOWEST, _ZERO
            for d in range(width):
                out_RND[r, n, d] = _ZERO
        if last < first:
            continue
        for origin in range(first // CHUNK * CHUNK, last + 1, CHUNK):
            begin, end = max(first - origin, 0), min(last - origin + 1, CHUNK)
            _find_slots(r, b, origin, begin, end, base_B[b], page_table_BP, path_RD, page_size, slot_C)
            for kv_head in range(kv_heads):
                head = kv_head * group
                _scores(q_RND, r, head, group, k_SKD, kv_head, slot_C, scale, score_GC)
                _weigh(score_GC, group, begin, end, lane_L, top_G, sum_G)
                _accumulate(score_GC, group, v_SKD, kv_head, slot_C, acc_GD)
                _merge(out_RND, r, head, group, acc_GD, top_G, sum_G, best_N, total_N)
        for n in range(heads):
            inverse = _ONE / total_N[n]
            for d in range(width):
                out_RND[r, n, d] *= inverse
