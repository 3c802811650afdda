"""Accept-iff-equal on the device: walks each verified tree, appends the tokens, ends sequences, and
lists the kept rows.

A draft is accepted if and only if it equals the token that the target sampled at its parent.
`accept` writes everything that the host needs into one int32 buffer, so a step costs one copy to
the host; `parse` reads it.

Legend: as in `tensors.py`; F = 4 + 2 (D + 1) fields of an entry's outcome, A = D + 1 tokens, I rows
of an entry's tree.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from tlt_kernels.gpu.target import PDL, lanes, pdl_launch, pdl_wait
from tlt_kernels.gpu.tensors import (
    PAGE_SIZE,
    BatchSlots,
    KeptRows,
    PrefillChunks,
    RowTable,
    Samples,
    Trees,
)

HEAD = 4  # count, accepted, verified, flags with own rows
DONE, BROKEN = 1, 2
# After the two flags, that field has the own rows verified in this many bits, then the accepted.
OWN_BITS = 15


class EntryOutcomes(NamedTuple):
    """The outcome of each entry. Tokens and log-probs are valid up to count_E."""

    count_E: NDArray[np.int32]  # tokens emitted: none after a stop id or the limit
    accepted_E: NDArray[np.int32]  # draft rows on the path, also those that a stop id cut off
    verified_E: NDArray[np.int32]  # draft rows verified
    # Those of both that are the drafter's own, without branches.
    own_accepted_E: NDArray[np.int32]
    own_verified_E: NDArray[np.int32]
    done_E: NDArray[np.bool_]  # the sequence has ended
    broken_E: NDArray[np.bool_]  # a log-prob was NaN: nothing was emitted, the sequence has ended
    token_EA: NDArray[np.int32]
    logprob_EA: NDArray[np.float32]


def fields(depth: int) -> int:
    """Return the int32 fields of an entry's outcome for row paths of this depth."""
    return HEAD + 2 * (max(depth, 1) + 1)


def parse(outcome_EF: NDArray[np.int32]) -> EntryOutcomes:
    """Return views of the buffer that `accept` wrote."""
    split = HEAD + (outcome_EF.shape[1] - HEAD) // 2
    flags_E = outcome_EF[:, 3]
    own_E = flags_E >> 2
    return EntryOutcomes(
        outcome_EF[:, 0],
        outcome_EF[:, 1],
        outcome_EF[:, 2],
        own_E >> OWN_BITS,
        own_E & ((1 << OWN_BITS) - 1),
        (flags_E & DONE) != 0,
        (flags_E & BROKEN) != 0,
        outcome_EF[:, HEAD:split],
        outcome_EF[:, split:].view(np.float32),
    )


@triton.jit(do_not_specialize=["B", "V"])
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
    own_V,
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
    OWN_BITS: tl.constexpr,
):
    """Walk one entry per program."""
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
    own_I = tl.load(own_V + row_I, mask=draft_I, other=0)
    stops_I = tl.zeros([IP], tl.int1)
    for k in tl.static_range(K):
        stop = tl.load(stop_QK + batch_slot * K + k)
        stops_I |= (sampled_I == stop) & (stop >= 0)

    step_I = tl.full([IP], -1, tl.int32)  # index of each row on the path, -1 = not on it
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
    flags = ended.to(tl.int32) + 2 * broken.to(tl.int32)
    own = tl.sum(own_I) | (tl.sum(tl.where(on_path_I, own_I, 0)) << OWN_BITS)
    tl.store(out + 3, flags | (own << 2))
    tl.store(out + HEAD + step_I, sampled_I, mask=kept_I)
    tl.store(out + HEAD + D + 1 + step_I, logprob_I.to(tl.int32, bitcast=True), mask=kept_I)
    last = tl.max(tl.where(kept_I, row_I, -1))  # rows of a path ascend
    if not decodes:
        last = tl.where(broken, -1, root)  # a chunk that does not sample yet also leaves its hint
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
        tl.store(on_path_V + row_I, (on_path_I & (broken == 0)).to(tl.int32), mask=tree_I)


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
    """Follow from each root the child whose token is the target's, and emit the target's tokens
    along the path.

    The path is cut after the first stop id and at the limit. The tokens are appended to the batch
    slot's text, its length grows, and `done_Q` is set if the sequence ends. `samples` are in the
    order of `trees.sample_row_S`. Of two children with the same token the first one is followed.
    """
    requests, path_depth = batch_slot_B.shape[0], rows.path_RD.shape[1]
    entries = requests + (chunks.count_W.shape[0] if chunks else 0)
    assert outcome_EF.shape[1] == fields(path_depth) and kept.source_BD.shape[1] == path_depth
    block = lanes(decode_rows)  # one request may have all rows
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
        trees.own_V,
        *kept,
        outcome_EF,
        decode_rows,
        PAGE=PAGE_SIZE,
        K=batch_slots.stop_QK.shape[1],
        D=path_depth,
        IP=block,
        HEAD=HEAD,
        OWN_BITS=OWN_BITS,
        num_warps=1 if block <= 256 else 4,
        **PDL,
    )
