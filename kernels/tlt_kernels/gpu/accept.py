"""Accept-iff-equal on the device: walk each verified tree, end sequences, move what was kept, learn
from it.

`accept` writes all that the host needs into one int32 buffer, so a cycle costs one copy to the
host; `parse` reads it.

Legend: as in `tensors.py`; F = 4 + 2 (D + 1) fields of an entry's outcome; I rows of an entry's
tree; L layers, X elements of a slot.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from tlt_kernels.gpu.target import PDL, pdl_launch, pdl_wait
from tlt_kernels.gpu.tensors import (
    PAGE_SIZE,
    BatchSlots,
    CalibrationTable,
    KeptRows,
    Nodes,
    PrefillChunks,
    RowTable,
    Samples,
    Trees,
)

HEAD = 4  # count, accepted, verified, flags
DONE, BROKEN = 1, 2


class EntryOutcomes(NamedTuple):
    """Per entry; tokens and log-probs are valid up to count_E."""

    count_E: NDArray[np.int32]  # tokens emitted, nothing behind a stop id or the limit
    accepted_E: NDArray[np.int32]  # draft rows on the path, also those that a stop id cut off
    verified_E: NDArray[np.int32]  # draft rows verified
    done_E: NDArray[np.bool_]  # the sequence has ended
    broken_E: NDArray[np.bool_]  # a log-prob was NaN: nothing was emitted, the sequence has ended
    token_EA: NDArray[np.int32]
    logprob_EA: NDArray[np.float32]


def fields(depth: int) -> int:
    """int32 fields of an entry's outcome; depth: that of the rows' paths."""
    return HEAD + 2 * (max(depth, 1) + 1)


def parse(outcome_EF: NDArray[np.int32]) -> EntryOutcomes:
    """Views of what `accept` wrote."""
    split = HEAD + (outcome_EF.shape[1] - HEAD) // 2
    flags_E = outcome_EF[:, 3]
    return EntryOutcomes(
        outcome_EF[:, 0],
        outcome_EF[:, 1],
        outcome_EF[:, 2],
        (flags_E & DONE) != 0,
        (flags_E & BROKEN) != 0,
        outcome_EF[:, HEAD:split],
        outcome_EF[:, split:].view(np.float32),
    )


@triton.jit
def _accept(
    batch_slot_B,
    batch_slot_W,
    B,
    token_S,
    logprob_S,
    token_QT,
    T,
    length_Q,
    limit_Q,
    page_table_QP,
    P,
    stop_QK,
    done_Q,
    token_R,
    kv_slot_R,
    parent_R,
    root_E,
    count_E,
    on_path_V,
    count_B,
    source_BD,
    target_BD,
    hint_row_E,
    hint_batch_slot_E,
    page_R,
    outcome_EF,
    V,
    PAGE: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    IP: tl.constexpr,
    HEAD: tl.constexpr,
):
    """One program per entry."""
    pdl_launch()
    e = tl.program_id(0)
    pdl_wait()
    decodes = e < B
    batch_slot = tl.load(batch_slot_B + e, mask=decodes, other=0)
    if not decodes:
        batch_slot = tl.load(batch_slot_W + e - B)
    root = tl.load(root_E + e)
    count = tl.load(count_E + e)
    length = tl.load(length_Q + batch_slot)
    limit = tl.load(limit_Q + batch_slot)
    i_I = tl.arange(0, IP)
    tree_I = i_I < count
    row_I = root + i_I
    sample_I = tl.where(decodes, row_I, V + e - B)
    sampled_I = tl.load(token_S + sample_I, mask=tree_I, other=-1)
    logprob_I = tl.load(logprob_S + sample_I, mask=tree_I, other=0.0)
    draft_I = tree_I & (i_I > 0)
    token_I = tl.load(token_R + row_I, mask=draft_I, other=-1)
    parent_I = tl.load(parent_R + row_I, mask=draft_I, other=-1) - root
    stops_I = tl.zeros([IP], tl.int1)
    for k in tl.static_range(K):
        stop = tl.load(stop_QK + batch_slot * K + k)
        stops_I |= (sampled_I == stop) & (stop >= 0)

    step_I = tl.full([IP], -1, tl.int32)  # where on the path a row stands
    steps = 0
    at = tl.where(count > 0, 0, IP)
    while at < IP:
        step_I = tl.where(i_I == at, steps, step_I)
        steps += 1
        target = tl.sum(tl.where(i_I == at, sampled_I, 0))
        at = tl.min(
            tl.where(draft_I & (parent_I == at) & (token_I == target) & (i_I > at), i_I, IP)
        )

    on_path_I = step_I >= 0
    ends_I = on_path_I & (stops_I | (length + step_I + 1 >= limit))
    emitted = tl.minimum(
        tl.min(tl.where(ends_I, step_I + 1, IP)), tl.minimum(steps, tl.maximum(limit - length, 0))
    )
    ended = tl.sum(ends_I.to(tl.int32)) > 0
    kept_I = on_path_I & (step_I < emitted)
    broken = tl.sum((kept_I & (logprob_I != logprob_I)).to(tl.int32)) > 0
    emitted = tl.where(broken, 0, emitted)
    kept_I = kept_I & (step_I < emitted)
    ended = ended | broken

    tl.store(token_QT + batch_slot.to(tl.int64) * T + length + step_I, sampled_I, mask=kept_I)
    tl.store(length_Q + batch_slot, length + emitted, mask=emitted > 0)
    tl.store(done_Q + batch_slot, 1, mask=ended)
    out = outcome_EF + e * (HEAD + 2 * (D + 1))
    tl.store(out, emitted)
    tl.store(out + 1, tl.maximum(steps - 1, 0))
    tl.store(out + 2, tl.maximum(count - 1, 0))
    tl.store(out + 3, ended.to(tl.int32) + 2 * broken.to(tl.int32))
    tl.store(out + HEAD + step_I, sampled_I, mask=kept_I)
    tl.store(out + HEAD + D + 1 + step_I, logprob_I.to(tl.int32, bitcast=True), mask=kept_I)
    last = tl.max(tl.where(kept_I, row_I, -1))  # rows of a path ascend
    if not decodes:
        last = tl.where(broken, -1, root)  # also of a chunk that does not sample yet
    tl.store(hint_row_E + e, last)
    tl.store(hint_batch_slot_E + e, batch_slot)
    if decodes:
        position_I = length - 1 + step_I
        page_I = tl.load(page_table_QP + batch_slot * P + position_I // PAGE, mask=kept_I, other=0)
        tl.store(page_R + row_I, page_I, mask=kept_I & (position_I % PAGE == PAGE - 1))
        moved_I = kept_I & (step_I > 0)
        at_I = e * D + step_I - 1
        tl.store(source_BD + at_I, tl.load(kv_slot_R + row_I, mask=moved_I, other=0), mask=moved_I)
        tl.store(target_BD + at_I, page_I * PAGE + position_I % PAGE, mask=moved_I)
        tl.store(count_B + e, tl.maximum(emitted - 1, 0))
        tl.store(on_path_V + row_I, on_path_I.to(tl.int32), mask=tree_I)


def accept(
    batch_slot_B: Tensor,
    chunks: PrefillChunks | None,
    samples: Samples,
    batch_slots: BatchSlots,
    rows: RowTable,
    trees: Trees,
    kept: KeptRows,
    outcome_EF: Tensor,
    *,
    decode_rows: int,
) -> None:
    """Follow from each root the child whose token is the target's; emit the target's tokens along
    the path.

    Truncates behind the first stop id or at the limit, appends to the batch slot's text, moves its
    length, sets done. `samples` are those of `trees.sample_row_S`. Of two children with the same token the first one is followed.
    """
    requests, path_depth = batch_slot_B.shape[0], rows.path_RD.shape[1]
    entries = requests + (chunks.count_W.shape[0] if chunks else 0)
    assert outcome_EF.shape[1] == fields(path_depth) and kept.source_BD.shape[1] == path_depth
    block = max(triton.next_power_of_2(decode_rows), 2)  # one request may have all rows
    _accept[(entries,)](
        batch_slot_B,
        chunks.batch_slot_W if chunks else batch_slot_B,
        requests,
        *samples,
        batch_slots.token_QT,
        batch_slots.token_QT.shape[1],
        batch_slots.length_Q,
        batch_slots.limit_Q,
        batch_slots.page_table_QP,
        batch_slots.page_table_QP.shape[1],
        batch_slots.stop_QK,
        batch_slots.done_Q,
        rows.token_R,
        rows.kv_slot_R,
        rows.parent_R,
        trees.root_E,
        trees.count_E,
        *kept,
        outcome_EF,
        decode_rows,
        PAGE=PAGE_SIZE,
        K=batch_slots.stop_QK.shape[1],
        D=path_depth,
        IP=block,
        HEAD=HEAD,
        num_warps=1 if block <= 256 else 4,
        **PDL,
    )


@triton.jit
def _commit_kv(
    count_B,
    source_BD,
    target_BD,
    k_LSX,
    v_LSX,
    layer_stride,
    X,
    D: tl.constexpr,
    DP: tl.constexpr,
    XB: tl.constexpr,
):
    """One program per request, layer and block of a slot."""
    pdl_launch()
    b = tl.program_id(0)
    pdl_wait()
    count = tl.load(count_B + b)
    if count <= 0:
        return
    d_D = tl.arange(0, DP)
    kept_D = d_D < count
    x_1X = tl.program_id(2) * XB + tl.arange(0, XB)[None, :]
    layer = tl.program_id(1).to(tl.int64) * layer_stride
    source_DX = (
        layer
        + tl.load(source_BD + b * D + d_D, mask=kept_D, other=0).to(tl.int64)[:, None] * X
        + x_1X
    )
    target_DX = (
        layer
        + tl.load(target_BD + b * D + d_D, mask=kept_D, other=0).to(tl.int64)[:, None] * X
        + x_1X
    )
    moved_DX = kept_D[:, None] & (x_1X < X)
    k_DX = tl.load(k_LSX + source_DX, mask=moved_DX)
    v_DX = tl.load(v_LSX + source_DX, mask=moved_DX)
    tl.store(k_LSX + target_DX, k_DX, mask=moved_DX)
    tl.store(v_LSX + target_DX, v_DX, mask=moved_DX)


def commit_kv(kept: KeptRows, k_LSKD: Tensor, v_LSKD: Tensor) -> None:
    """Copy the KV of accepted rows from scratch to their pages, in all layers; a slot's elements
    lie together.
    """
    layers, _, heads, width = k_LSKD.shape
    elements = heads * width
    assert k_LSKD.stride() == v_LSKD.stride() and k_LSKD.stride()[1:] == (elements, width, 1)
    requests, depth = kept.source_BD.shape
    if not requests:
        return
    depth_block = triton.next_power_of_2(depth)
    block = min(triton.next_power_of_2(elements), max(64, 4096 // depth_block))
    _commit_kv[(requests, layers, triton.cdiv(elements, block))](
        kept.count_B,
        kept.source_BD,
        kept.target_BD,
        k_LSKD,
        v_LSKD,
        k_LSKD.stride(0),
        elements,
        D=depth,
        DP=depth_block,
        XB=block,
        num_warps=4,
        **PDL,
    )


@triton.jit
def _store_hints(
    page_R,
    R,
    hint_row_E,
    hint_batch_slot_E,
    g_RH,
    hint_QH,
    page_hint_PH,
    H: tl.constexpr,
    HP: tl.constexpr,
):
    """One program per row and per entry."""
    pdl_launch()
    r = tl.program_id(0)
    pdl_wait()
    h_H = tl.arange(0, HP)
    if r < R:
        page = tl.load(page_R + r)
        if page >= 0:
            g_H = tl.load(g_RH + r.to(tl.int64) * H + h_H, mask=h_H < H)
            tl.store(page_hint_PH + page.to(tl.int64) * H + h_H, g_H, mask=h_H < H)
    else:
        row = tl.load(hint_row_E + r - R)
        if row >= 0:
            g_H = tl.load(g_RH + row.to(tl.int64) * H + h_H, mask=h_H < H)
            tl.store(
                hint_QH + tl.load(hint_batch_slot_E + r - R).to(tl.int64) * H + h_H,
                g_H,
                mask=h_H < H,
            )


def store_hints(
    kept: KeptRows, g_RH: Tensor, batch_slots: BatchSlots, page_hint_PH: Tensor
) -> None:
    """Remember the fused feature of each sequence's last position, and of the last position of
    every page that was filled.
    """
    rows, hidden = kept.page_R.shape[0], g_RH.shape[1]
    _store_hints[(rows + kept.hint_row_E.shape[0],)](
        kept.page_R,
        rows,
        kept.hint_row_E,
        kept.hint_batch_slot_E,
        g_RH,
        batch_slots.hint_QH,
        page_hint_PH,
        H=hidden,
        HP=triton.next_power_of_2(hidden),
        num_warps=4,
        **PDL,
    )


@triton.jit
def _calibrate(
    node_V,
    on_path_V,
    parent_R,
    cell_N,
    prior_Z,
    survival_Z,
    hits_Z,
    trials_Z,
    V,
    prior_weight,
    limit,
    VP: tl.constexpr,
):
    """One program in all. Rows of one cell write the same values."""
    pdl_launch()
    v_V = tl.arange(0, VP)
    pdl_wait()
    node_V_ = tl.load(node_V + v_V, mask=v_V < V, other=-1)
    parent_V = tl.load(parent_R + v_V, mask=node_V_ >= 0, other=0)
    tried_V = (node_V_ >= 0) & (tl.load(on_path_V + parent_V, mask=node_V_ >= 0, other=0) > 0)
    hit_V = tl.load(on_path_V + v_V, mask=tried_V, other=0)
    cell_V = tl.load(cell_N + node_V_, mask=tried_V, other=0)
    tl.atomic_add(trials_Z + cell_V, 1, mask=tried_V, sem="relaxed")
    tl.atomic_add(hits_Z + cell_V, hit_V, mask=tried_V, sem="relaxed")
    tl.debug_barrier()
    trials_V = tl.load(trials_Z + cell_V, mask=tried_V, other=0)
    hits_V = tl.load(hits_Z + cell_V, mask=tried_V, other=0)
    prior_V = tl.load(prior_Z + cell_V, mask=tried_V, other=0.0)
    tl.debug_barrier()
    tl.store(
        survival_Z + cell_V,
        (prior_weight * prior_V + hits_V) / (prior_weight + trials_V),
        mask=tried_V,
    )
    full_V = tried_V & (trials_V >= limit)
    tl.store(trials_Z + cell_V, trials_V // 2, mask=full_V)
    tl.store(hits_Z + cell_V, hits_V // 2, mask=full_V)


def calibrate(
    trees: Trees,
    kept: KeptRows,
    nodes: Nodes,
    rows: RowTable,
    calibration: CalibrationTable,
    *,
    decode_rows: int,
    prior_weight: float = 64.0,
    limit: int = 4096,
) -> None:
    """Count every verified node whose parent is on the path, refresh the table in force, halve
    counts that reach `limit` trials.
    """
    block = max(triton.next_power_of_2(decode_rows), 2)
    _calibrate[(1,)](
        trees.node_V,
        kept.on_path_V,
        rows.parent_R,
        nodes.cell_BC,
        *calibration,
        decode_rows,
        prior_weight,
        limit,
        VP=block,
        num_warps=1 if block <= 128 else 4,
        **PDL,
    )
