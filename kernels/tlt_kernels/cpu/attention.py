"""Paged tree attention: per (row, KV head), chunks of 64 absolute key positions, merged in chunk
order.

The `cpu` attention backend calls it. A row's bits depend only on its query, position and visible
keys. Rows of one request form a tile: chunks that are committed and visible to all of them are
loaded once for the tile. Other chunks are processed row by row, with keys found through the row's
KV slots, so a draft ancestor is read at the index that it will have once committed. Both use the
same compiled code, which handles two queries at a time and gives each the same bits with any
partner.

Threads: the kernel is single-threaded and releases the GIL; the backend cuts large calls by rows
over a small pool of Python threads. numba's parallel loops are not used: they would compile the row
a second time, with different bits, and add a third pool of workers to torch's OpenMP. Measured
between torch matmuls on two busy cores, 64 rows of 640 keys, median of the whole: 1.7 to 2.0 ms
with this pool, 1.7 to 3.4 with numba's omp and workqueue layers, 1.6 to 2.3 single-threaded.

Legend: R rows, N query heads, K KV heads, G = N / K heads of one KV head, D head width, S KV slots,
B requests, P pages, Q queries of a tile for one KV head (row after row, G each), T rows of a tile,
C keys of a chunk, L lanes.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tlt_kernels.cpu.compiled import kernel
from tlt_kernels.cpu.exponential import exp
from tlt_kernels.cpu.vector import KEYS, dots, weighted_sums

CHUNK = 64  # key positions per softmax chunk
TILE = 32  # rows of a tile, at most
_LANES = 16
_ZERO, _ONE, _MINUS_INFINITY = np.float32(0.0), np.float32(1.0), np.float32(-np.inf)
_LOWEST = np.float32(-3.0e38)  # the running maximum before the first chunk; sum and output are 0


@njit(cache=True, error_model="numpy")
def _find_kv_slots(r, b, origin, begin, end, base, page_table_BP, path_RD, page_size, kv_slot_C):
    """Write the KV slots of positions origin + [begin, end); the other lanes repeat the first
    slot.
    """
    page, offset = (origin + begin) // page_size, (origin + begin) % page_size
    for c in range(begin, end):
        if origin + c < base:
            kv_slot_C[c] = page_table_BP[b, page] * page_size + offset
        else:
            kv_slot_C[c] = path_RD[r, origin + c - base]
        offset += 1
        if offset == page_size:
            page, offset = page + 1, 0
    for c in range(begin):
        kv_slot_C[c] = kv_slot_C[begin]
    for c in range(end, CHUNK):
        kv_slot_C[c] = kv_slot_C[begin]


@njit(cache=True, error_model="numpy")
def _addresses(array_SKD, kv_head, kv_slot_C, address_C):
    kv_heads, width = array_SKD.shape[1], array_SKD.shape[2]
    for c in range(CHUNK):
        address_C[c] = array_SKD.ctypes.data + 4 * width * (kv_slot_C[c] * kv_heads + kv_head)


@njit(cache=True, error_model="numpy")
def _scores(q_RND, first_row, queries, group, kv_head, address_C, scale, score_QC):
    """Compute the scaled dot products of the tile's queries with the chunk's 64 keys. An odd last
    query is paired with itself.
    """
    heads, width = q_RND.shape[1], q_RND.shape[2]
    for c in range(0, CHUNK, KEYS):
        keys = address_C.ctypes.data + 8 * c
        for i in range(0, queries, 2):
            j = min(i + 1, queries - 1)
            query_i = q_RND.ctypes.data + 4 * width * (
                (first_row + i // group) * heads + kv_head * group + i % group
            )
            query_j = q_RND.ctypes.data + 4 * width * (
                (first_row + j // group) * heads + kv_head * group + j % group
            )
            out = score_QC.ctypes.data + 4 * c
            dots(query_i, query_j, keys, width, scale, out + 4 * CHUNK * i, out + 4 * CHUNK * j)  # type: ignore[call-arg]


@njit(cache=True, error_model="numpy")
def _fill_outside(score_C, begin, end, value):
    """Set the lanes outside [begin, end)."""
    for c in range(begin):
        score_C[c] = value
    for c in range(end, CHUNK):
        score_C[c] = value


@njit(cache=True, error_model="numpy")
def _maximum(score_C, lane_L):
    """Return the maximum of a chunk, over 16 interleaved lanes first."""
    for i in range(_LANES):
        lane_L[i] = score_C[i]
    for c in range(_LANES, CHUNK, _LANES):
        for i in range(_LANES):
            lane_L[i] = score_C[c + i] if score_C[c + i] > lane_L[i] else lane_L[i]
    half = _LANES // 2
    while half:
        for i in range(half):
            lane_L[i] = lane_L[half + i] if lane_L[half + i] > lane_L[i] else lane_L[i]
        half //= 2
    return lane_L[0]


@njit(cache=True, error_model="numpy")
def _total(score_C, lane_L):
    """Return the sum of a chunk, over 16 interleaved lanes first."""
    for i in range(_LANES):
        lane_L[i] = score_C[i]
    for c in range(_LANES, CHUNK, _LANES):
        for i in range(_LANES):
            lane_L[i] += score_C[c + i]
    half = _LANES // 2
    while half:
        for i in range(half):
            lane_L[i] += lane_L[half + i]
        half //= 2
    return lane_L[0]


@njit(cache=True, fastmath={"contract"}, error_model="numpy")
def _weigh(score_QC, queries, begin, end, lane_L, top_Q, sum_Q):
    """Replace the scores of lanes [begin, end) by exp(score - maximum), and other lanes by 0.

    Interleaved lanes let maximum and sum be vectorised in one fixed order.
    """
    for q in range(queries):
        score_C = score_QC[q]
        _fill_outside(score_C, begin, end, _MINUS_INFINITY)
        top = _maximum(score_C, lane_L)
        for c in range(CHUNK):
            score_C[c] = exp(score_C[c] - top)
        _fill_outside(score_C, begin, end, _ZERO)
        top_Q[q], sum_Q[q] = top, _total(score_C, lane_L)


@njit(cache=True, error_model="numpy")
def _accumulate(score_QC, queries, address_C, acc_QD):
    """Add the chunk's values, weighted."""
    width = acc_QD.shape[1]
    for i in range(0, queries, 2):
        j = min(i + 1, queries - 1)
        weights, out = score_QC.ctypes.data, acc_QD.ctypes.data
        weights_i, weights_j, out_i, out_j = (
            weights + 4 * CHUNK * i,
            weights + 4 * CHUNK * j,
            out + 4 * width * i,
            out + 4 * width * j,
        )
        weighted_sums(weights_i, weights_j, address_C.ctypes.data, CHUNK, width, out_i, out_j)  # type: ignore[call-arg]


@njit(cache=True, fastmath={"contract"}, error_model="numpy")
def _merge(
    out_RND, first_row, tile_row, queries, group, kv_head, acc_QD, top_Q, sum_Q, best_TN, total_TN
):
    """Fold the next chunk into the running maximum, sum and output of the tile's queries."""
    for q in range(queries):
        t, n = tile_row + q // group, kv_head * group + q % group
        r = first_row + q // group
        best = max(best_TN[t, n], top_Q[q])
        old, new = exp(best_TN[t, n] - best), exp(top_Q[q] - best)
        best_TN[t, n], total_TN[t, n] = best, total_TN[t, n] * old + sum_Q[q] * new
        for d in range(acc_QD.shape[1]):
            out_RND[r, n, d] = out_RND[r, n, d] * old + acc_QD[q, d] * new


@kernel(
    "(f4[:, :, ::1], f4[:, :, ::1], f4[:, :, ::1], i8[::1], i4[::1], i4[::1], i4[:, ::1],"
    " i4[:, ::1], i8, i8, f4, f4[:, :, ::1], i8, i8)",
    fastmath={"contract"},
    error_model="numpy",
    nogil=True,
)
def attend_rows(
    q_RND,
    k_SKD,
    v_SKD,
    position_R,
    request_R,
    base_B,
    page_table_BP,
    path_RD,
    page_size,
    first,
    scale,
    out_RND,
    start,
    stop,
):
    """Write `out_RND[start:stop]`. Row r sees key positions [first, position_R[r]]; without a key
    it gets zeros.

    Lanes of a chunk outside that range point at a visible KV slot with weight 0, so nothing
    invisible is ever read.
    """
    heads, kv_heads, width = q_RND.shape[1], k_SKD.shape[1], k_SKD.shape[2]
    group = heads // kv_heads
    most = min(TILE, stop - start) * group
    kv_slot_C, address_C = np.empty(CHUNK, np.int64), np.empty(CHUNK, np.int64)
    score_QC = np.empty((most, CHUNK), np.float32)
    acc_QD = np.empty((most, width), np.float32)
    lane_L = np.empty(_LANES, np.float32)
    top_Q, sum_Q = np.empty(most, np.float32), np.empty(most, np.float32)
    best_TN, total_TN = np.empty((TILE, heads), np.float32), np.empty((TILE, heads), np.float32)
    above = start
    while above < stop:  # a tile of rows [above, below) of request b
        b, below, lowest = request_R[above], above, base_B[request_R[above]] - 1
        while below < min(stop, above + TILE) and request_R[below] == b:
            lowest = min(lowest, position_R[below])
            below += 1
        shared = (
            (lowest + 1) // CHUNK * CHUNK
        )  # chunks below it are committed, and whole for every row
        best_TN[:] = _LOWEST
        total_TN[:] = _ZERO
        out_RND[above:below] = _ZERO
        for turn in range(-1, below - above):  # the whole tile, then its rows one by one
            tile_row, rows = (0, below - above) if turn < 0 else (turn, 1)
            r, queries = above + tile_row, rows * group
            origin = first // CHUNK * CHUNK if turn < 0 else max(first // CHUNK * CHUNK, shared)
            last = shared - 1 if turn < 0 else position_R[r]
            if last < first:
                continue
            while origin <= last:
                begin, end = max(first - origin, 0), min(last - origin + 1, CHUNK)
                _find_kv_slots(
                    r,
                    b,
                    origin,
                    begin,
                    end,
                    base_B[b],
                    page_table_BP,
                    path_RD,
                    page_size,
                    kv_slot_C,
                )
                for kv_head in range(kv_heads):
                    _addresses(k_SKD, kv_head, kv_slot_C, address_C)
                    _scores(q_RND, r, queries, group, kv_head, address_C, scale, score_QC)
                    _weigh(score_QC, queries, begin, end, lane_L, top_Q, sum_Q)
                    _addresses(v_SKD, kv_head, kv_slot_C, address_C)
                    _accumulate(score_QC, queries, address_C, acc_QD)
                    _merge(
                        out_RND,
                        r,
                        tile_row,
                        queries,
                        group,
                        kv_head,
                        acc_QD,
                        top_Q,
                        sum_Q,
                        best_TN,
                        total_TN,
                    )
                origin += CHUNK
        for r in range(above, below):
            for n in range(heads):
                if total_TN[r - above, n] > _ZERO:
                    inverse = _ONE / total_TN[r - above, n]
                    for d in range(width):
                        out_RND[r, n, d] *= inverse
        above = below
