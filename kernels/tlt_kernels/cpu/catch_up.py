"""Searches page by page for committed positions that a drafter's KV lacks.

Slow twin: `tests/unit/test_drafters.py`. Legend: B requests, P pages per request, S KV slots, R
rows.
"""

from __future__ import annotations

from tlt_kernels.cpu.compiled import kernel


@kernel("(i4[:, ::1], i8[::1], i8, b1[::1], b1[::1], i8[::1], i8[::1], i8[::1], i8[::1], i4[::1])")
def undrafted(
    page_table_BP,
    root_position_B,
    page_size,
    drafted_S,
    full_P,
    cursor,
    kv_slot_R,
    previous_kv_slot_R,
    position_R,
    request_R,
):
    """Collect up to len(kv_slot_R) undrafted KV slots of positions 1 .. root - 1, and mark them as
    drafted. Return their number.

    `cursor` = [request, position] is the start of the next search; request = B means that nothing
    is left. A KV slot shared by several requests is collected once. previous_kv_slot_R: the KV slot
    of the preceding position, which has the row's feature. full_P: pages to skip, with every KV
    slot drafted (position 0 has no preceding feature and never counts).
    """
    rows = 0
    b = cursor[0]
    position = cursor[1]
    while b < len(root_position_B):
        while position < root_position_B[b]:
            index = position // page_size
            page = page_table_BP[b, index]
            if full_P[page]:
                position = (index + 1) * page_size
                continue
            kv_slot = page * page_size + position % page_size
            if not drafted_S[kv_slot]:
                if rows == len(kv_slot_R):
                    cursor[0], cursor[1] = b, position
                    return rows
                drafted_S[kv_slot] = True
                before = position - 1
                kv_slot_R[rows] = kv_slot
                previous_kv_slot_R[rows] = (
                    page_table_BP[b, before // page_size] * page_size + before % page_size
                )
                position_R[rows] = position
                request_R[rows] = b
                rows += 1
            position += 1
            if position % page_size == 0:
                full_P[page] = drafted_S[
                    page * page_size + (index == 0) : (page + 1) * page_size
                ].all()
        b += 1
        position = 1
    cursor[0], cursor[1] = b, 1
    return rows


@kernel(
    "(i4[:, ::1], i8[::1], i4[::1], i8, b1[::1], i8, i8[::1], i8[::1], i8[::1], i4[::1], i4[::1])"
)
def lay_roots(
    page_table_BP,
    root_position_B,
    depth_limit_B,
    page_size,
    drafted_S,
    first,
    kv_slot_R,
    previous_kv_slot_R,
    position_R,
    request_R,
    node_R,
):
    """Lay out the root row of every request with a depth limit above 0, from row `first` on. Return
    their number.

    A root's token and the preceding feature are the target's own, so its KV slot counts as drafted.
    """
    rows = first
    for b in range(len(root_position_B)):
        if depth_limit_B[b] <= 0:
            continue
        position = root_position_B[b]
        before = position - 1
        kv_slot = page_table_BP[b, position // page_size] * page_size + position % page_size
        drafted_S[kv_slot] = True
        kv_slot_R[rows] = kv_slot
        previous_kv_slot_R[rows] = (
            page_table_BP[b, before // page_size] * page_size + before % page_size
        )
        position_R[rows] = position
        request_R[rows] = b
        node_R[rows] = -1
        rows += 1
    return rows - first
