"""Layout of a step's rows: each request's committed-token rows in position order, then its draft
rows, parents first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tlt_kernels.cpu.compiled import kernel


class RowLayout(NamedTuple):
    """R rows of W requests. The path of draft row r is `path_RD[r]`: the scratch KV slots of its
    in-flight ancestors and of itself.
    """

    token_R: NDArray[np.int64]
    position_R: NDArray[np.int64]
    kv_slot_R: NDArray[np.int64]
    request_R: NDArray[np.int32]
    parent_R: NDArray[np.int32]  # row of the parent; -1 for certain rows
    path_RD: NDArray[np.int32]
    path_token_RD: NDArray[np.int32]  # tokens of the same path, -1 padded
    root_W: NDArray[np.int32]  # each request's last certain row
    drafts_W: NDArray[np.int32]  # draft rows after it


@kernel(
    "(i8[::1], i8[::1], i4[:, ::1], i8, i8, i4[::1], i4[::1], i4[::1], i4[::1], i8[::1], "
    "i8[::1], i8[::1], i4[::1], i4[::1], i4[:, ::1], i4[:, ::1], i4[::1], i4[::1], i4[::1])"
)
def _fill(
    start_W,
    end_W,
    table_WP,
    page_size,
    scratch_start,
    tokens,
    node_request_N,
    node_parent_N,
    node_token_N,
    token_R,
    position_R,
    kv_slot_R,
    request_R,
    parent_R,
    path_RD,
    path_token_RD,
    root_W,
    drafts_W,
    row_N,
):  # type: ignore[no-untyped-def]
    r = 0
    n = 0
    t = 0
    for w in range(start_W.shape[0]):
        for p in range(start_W[w], end_W[w]):
            token_R[r] = tokens[t]
            position_R[r] = p
            kv_slot_R[r] = table_WP[w, p // page_size] * page_size + p % page_size
            request_R[r] = w
            parent_R[r] = -1
            t += 1
            r += 1
        root = r - 1
        root_W[w] = root
        while n < node_request_N.shape[0] and node_request_N[n] == w:
            parent = root if node_parent_N[n] < 0 else row_N[node_parent_N[n]]
            depth = position_R[parent] - position_R[root]
            token_R[r] = node_token_N[n]
            position_R[r] = position_R[parent] + 1
            kv_slot_R[r] = scratch_start + n
            request_R[r] = w
            parent_R[r] = parent
            for d in range(depth):
                path_RD[r, d] = path_RD[parent, d]
                path_token_RD[r, d] = path_token_RD[parent, d]
            path_RD[r, depth] = scratch_start + n
            path_token_RD[r, depth] = node_token_N[n]
            row_N[n] = r
            n += 1
            r += 1
        drafts_W[w] = r - 1 - root


def layout_rows(
    start_W: NDArray[np.int64],
    end_W: NDArray[np.int64],
    table_WP: NDArray[np.int32],
    page_size: int,
    scratch_start: int,
    tokens: NDArray[np.int32],
    node_request_N: NDArray[np.int32],
    node_parent_N: NDArray[np.int32],
    node_token_N: NDArray[np.int32],
    depth: int,
) -> RowLayout:
    """Lay out the rows of a step. `tokens`: of the non-draft rows, grouped by request. Nodes are
    grouped by request, parents first.
    """
    requests, nodes = len(start_W), len(node_request_N)
    rows = len(tokens) + nodes
    layout = RowLayout(
        np.empty(rows, np.int64),
        np.empty(rows, np.int64),
        np.empty(rows, np.int64),
        np.empty(rows, np.int32),
        np.empty(rows, np.int32),
        np.full((rows, depth), -1, np.int32),
        np.full((rows, depth), -1, np.int32),
        np.empty(requests, np.int32),
        np.empty(requests, np.int32),
    )
    _fill(
        start_W,
        end_W,
        table_WP,
        page_size,
        scratch_start,
        tokens,
        node_request_N,
        node_parent_N,
        node_token_N,
        *layout,
        np.empty(nodes, np.int32),
    )
    return layout
