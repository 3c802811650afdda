"""Drafting without a model, on the device: the continuations of earlier occurrences of a request's
last tokens, in its own text and its siblings'.

The scan is brute force over the text of every batch slot of the same group, ended ones included;
the prompts of siblings are left out. The longest, then latest occurrences become one trie here, or
a branch of another drafter's tree in `branches.py`.

Legend: as in `tensors.py`; J scanning programs per request, W matches kept, I positions of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt_kernels.gpu.growth import draft_limit
from tlt_kernels.gpu.target import PDL, pdl_launch, pdl_wait
from tlt_kernels.gpu.tensors import BatchSlots, CalibrationTable, Nodes

MAX_MATCH = 16  # tokens in common that count at most; a single one is no occurrence
MEMBERS = 24  # texts that one request looks through: its own, and the first of its group
STEP = 7  # tokens compared between two looks at whether some occurrence goes on
# The largest probability of a node: below it, rounding cannot exceed the parent's.
CERTAIN = tl.constexpr(0.999)
BLOCK = 2048  # positions that a scanning program compares at once
PROGRAMS = 1024  # scanning programs, about
LENGTHS, SHARES, DEPTHS = 7, 8, 8  # buckets of the calibration table


def workspace(requests: int, width: int, batch_slots: BatchSlots) -> Tensor:
    """Return match_BJW: int64 keys of the matches that each scanning program found."""
    texts, tokens = batch_slots.token_QT.shape
    blocks = triton.next_power_of_2(texts * triton.cdiv(tokens, BLOCK))
    scanners = min(max(triton.next_power_of_2(PROGRAMS // requests), 16), 128, blocks)
    return torch.empty(
        requests,
        scanners,
        triton.next_power_of_2(width),
        dtype=torch.int64,
        device=batch_slots.token_QT.device,
    )


@triton.jit
def _scan(
    batch_slot_B,
    token_QT,
    T,
    length_Q,
    limit_Q,
    capacity_Q,
    done_Q,
    drafters_Q,
    max_depth_Q,
    group_Q,
    first_Q,
    Q,
    match_BJW,
    depth,
    DRAFTERS: tl.constexpr,
    W: tl.constexpr,
    WP: tl.constexpr,
    QP: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_MATCH: tl.constexpr,
    MEMBERS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Scan, in program (b, j), a part of a text that request b may draft from, or whole texts.
    Keys: match length, position, batch slot.
    """
    pdl_launch()
    b, j, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    pdl_wait()
    batch_slot = tl.load(batch_slot_B + b)
    length = tl.load(length_Q + batch_slot)
    group = tl.load(group_Q + batch_slot)
    w_W = tl.arange(0, WP)
    best_W = tl.where(
        w_W < W, (-1 - w_W).to(tl.int64), tl.full([WP], 1 << 62, tl.int64)
    )  # all different; negative = empty
    members = 0
    q_Q = tl.arange(0, QP)
    group_Q_ = tl.load(group_Q + q_Q, mask=q_Q < Q, other=-1)
    other_Q = (q_Q != batch_slot) & (group_Q_ >= 0) & (group_Q_ == group)
    number_Q = tl.where(other_Q, tl.cumsum(other_Q.to(tl.int32), axis=0), -1)
    number_Q = tl.where(q_Q == batch_slot, 0, number_Q)
    limit = draft_limit(
        batch_slot, length, depth, limit_Q, capacity_Q, done_Q, drafters_Q, max_depth_Q, DRAFTERS
    )
    if limit > 0:
        members = tl.minimum(1 + tl.sum(other_Q.to(tl.int32)), MEMBERS)
    own = token_QT + batch_slot.to(tl.int64) * T + length - 1
    last, second = (
        tl.load(own, mask=members > 0, other=0),
        tl.load(own - 1, mask=members > 0, other=0),
    )
    some = tl.maximum(members, 1)
    parts = tl.maximum(
        programs // some, 1
    )  # programs that share a text; with more texts than programs, each takes several
    part = j // some
    for member in range(j % some, tl.where(part < parts, members, 0), programs):
        q = tl.sum(tl.where(number_Q == member, q_Q, 0))
        known = tl.load(length_Q + q)
        first = tl.load(first_Q + q, mask=q != batch_slot, other=0)
        text = token_QT + q.to(tl.int64) * T
        blocks = tl.cdiv(tl.maximum(known - 1 - first, 0), BLOCK)
        for block in range(part, blocks, parts):  # the latest first: most inserts happen early
            i_I = first + (blocks - 1 - block) * BLOCK + tl.arange(0, BLOCK)
            inside_I = (i_I > first) & (i_I < known - 1)  # something must follow
            last_I = tl.load(text + i_I, mask=inside_I, other=-1)
            second_I = tl.load(text + i_I - 1, mask=inside_I, other=-1)
            run_I = inside_I & (last_I == last) & (second_I == second)
            common_I = tl.where(run_I, 2, 0)
            longest = tl.max(common_I)
            compared = 2
            while (longest == compared) & (compared < MAX_MATCH):  # some occurrence goes on
                for _ in tl.static_range(STEP):
                    suffix = tl.load(own - compared, mask=compared < length, other=-1)
                    run_I = run_I & (i_I - compared >= first)
                    run_I = run_I & (compared < tl.minimum(length, MAX_MATCH))
                    before_I = tl.load(text + i_I - compared, mask=run_I, other=-2)
                    run_I = run_I & (before_I == suffix)
                    common_I += run_I.to(tl.int32)
                    compared += 1
                longest = tl.max(common_I)
            if longest > 0:
                hit_I = (common_I > 0) & (2 * common_I >= longest)
                key_I = tl.where(
                    hit_I, (common_I.to(tl.int64) << 48) | (i_I.to(tl.int64) << 16) | q, -1
                )
                best, least = tl.max(key_I), tl.min(best_W)
                while best > tl.maximum(least, 0):
                    best_W = tl.where(best_W == least, best, best_W)
                    key_I = tl.where(key_I == best, -1, key_I)
                    best, least = tl.max(key_I), tl.min(best_W)
    tl.store(match_BJW + (b * programs + j) * WP + w_W, best_W, mask=w_W < W)


@triton.jit
def best_matches(match_BJW, b, W, WP: tl.constexpr, J: tl.constexpr):
    """Return the keys of request b's W best matches, best first, and their lengths; -1 and 0 for
    missing matches, and for those less than half as long as the longest.
    """
    x_X = tl.arange(0, J * WP)
    key_X = tl.load(match_BJW + b * J * WP + x_X, mask=x_X % WP < W, other=-1)
    w_W = tl.arange(0, WP)
    key_W = tl.full([WP], -1, tl.int64)
    best = tl.max(key_X)
    found = 0
    while (best >= 0) & (found < W):
        key_W = tl.where(w_W == found, best, key_W)
        key_X = tl.where(key_X == best, -1, key_X)
        best = tl.max(key_X)
        found += 1
    common_W = tl.where(key_W >= 0, (key_W >> 48).to(tl.int32), 0)
    alive_W = (key_W >= 0) & (2 * common_W >= tl.max(common_W))  # others only blur the shares
    return tl.where(alive_W, key_W, -1), tl.where(alive_W, common_W, 0)


@triton.jit
def continuations(key_W, token_QT, T, length_Q, limit, DP: tl.constexpr):
    """Return (token_WD, alive_WD): the tokens after the matches, up to `limit` of each."""
    next_W = ((key_W >> 16) & 0xFFFFFFFF).to(tl.int32) + 1
    q_W = tl.where(key_W >= 0, key_W & 0xFFFF, 0)
    known_W = tl.load(length_Q + q_W, mask=key_W >= 0, other=0)
    d_1D = tl.arange(0, DP)[None, :]
    alive_WD = (key_W >= 0)[:, None] & (next_W[:, None] + d_1D < known_W[:, None]) & (d_1D < limit)
    token_WD = tl.load(token_QT + (q_W * T + next_W)[:, None] + d_1D, mask=alive_WD, other=-1)
    return token_WD, alive_WD


@triton.jit
def length_bucket(length):
    """Return the bucket of match lengths, see `cpu.match.length_bucket`."""
    bucket = (length >= 3).to(tl.int32) + (length >= 4).to(tl.int32) + (length >= 6).to(tl.int32)
    bucket += (length >= 9).to(tl.int32) + (length >= 13).to(tl.int32)
    return bucket + (length >= 16).to(tl.int32)


@triton.jit
def _merge(
    batch_slot_B,
    token_QT,
    T,
    length_Q,
    limit_Q,
    capacity_Q,
    done_Q,
    drafters_Q,
    max_depth_Q,
    match_BJW,
    parent_BC,
    token_BC,
    depth_BC,
    cell_BC,
    source_BC,
    kv_slot_BC,
    acceptance_BC,
    C,
    acceptance_Z,
    depth,
    DRAFTERS: tl.constexpr,
    W: tl.constexpr,
    WP: tl.constexpr,
    J: tl.constexpr,
    DP: tl.constexpr,
    SHARES: tl.constexpr,
    DEPTHS: tl.constexpr,
    CERTAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge one request per program: its W best keys, then, level by level, the matches that still
    agree.
    """
    pdl_launch()
    b = tl.program_id(0)
    pdl_wait()
    batch_slot = tl.load(batch_slot_B + b)
    length = tl.load(length_Q + batch_slot)
    limit = draft_limit(
        batch_slot, length, depth, limit_Q, capacity_Q, done_Q, drafters_Q, max_depth_Q, DRAFTERS
    )
    key_W, common_W = best_matches(match_BJW, b, W, WP, J)
    token_WD, alive_WD = continuations(key_W, token_QT, T, length_Q, limit, DP)
    w_W = tl.arange(0, WP)
    d_1D = tl.arange(0, DP)[None, :]
    parent_WD = tl.zeros([WP, DP], tl.int32)
    first_WD = tl.zeros([WP, DP], tl.int32)
    cell_WD = tl.zeros([WP, DP], tl.int32)
    together_WW = tl.full(
        [WP, WP], 1, tl.int1
    )  # pairs of matches that have gone the same way so far
    node_W = tl.full([WP], -1, tl.int32)
    deepest = tl.max(tl.sum(alive_WD.to(tl.int32), axis=1))
    for d in range(deepest):
        now_1D = d_1D == d
        token_W = tl.sum(tl.where(now_1D, token_WD, 0), axis=1)
        goes_on_W = tl.sum((now_1D & alive_WD).to(tl.int32), axis=1) > 0
        together_WW = together_WW & goes_on_W[:, None] & goes_on_W[None, :]
        total_W = tl.sum(together_WW.to(tl.int32), axis=1)
        together_WW = together_WW & (token_W[:, None] == token_W[None, :])
        count_W = tl.sum(together_WW.to(tl.int32), axis=1)
        first_W = tl.min(tl.where(together_WW, w_W[None, :], WP), axis=1)
        length_W = tl.max(tl.where(together_WW, common_W[None, :], 0), axis=1) + d
        share_W = (count_W * SHARES + total_W - 1) // tl.maximum(total_W, 1) - 1
        cell_W = (length_bucket(length_W) * SHARES + share_W) * DEPTHS + tl.minimum(d, DEPTHS - 1)
        parent_WD = tl.where(now_1D, node_W[:, None], parent_WD)
        first_WD = tl.where(now_1D, first_W[:, None], first_WD)
        cell_WD = tl.where(now_1D, cell_W[:, None], cell_WD)
        node_W = d * W + first_W
    chance_WD = tl.load(acceptance_Z + cell_WD, mask=alive_WD, other=0.0)
    acceptance_WD = tl.cumprod(tl.minimum(tl.maximum(chance_WD, 0.0), CERTAIN), axis=1)
    w_W1 = w_W[:, None]
    at_WD = b * C + d_1D * W + w_W1
    stored_WD = (w_W1 < W) & (d_1D < depth)
    whole_WD = tl.zeros([WP, DP], tl.int32)
    tl.store(parent_BC + at_WD, parent_WD, mask=stored_WD)
    tl.store(token_BC + at_WD, token_WD, mask=stored_WD)
    tl.store(depth_BC + at_WD, whole_WD + d_1D + 1, mask=stored_WD)
    tl.store(cell_BC + at_WD, cell_WD, mask=stored_WD)
    tl.store(source_BC + at_WD, whole_WD - 1, mask=stored_WD)
    tl.store(kv_slot_BC + at_WD, whole_WD - 1, mask=stored_WD)
    tl.store(
        acceptance_BC + at_WD,
        tl.where(alive_WD & (first_WD == w_W1), acceptance_WD, -1.0),
        mask=stored_WD,
    )
    for first in range(depth * W, C, BLOCK):
        c_C = first + tl.arange(0, BLOCK)
        tl.store(acceptance_BC + b * C + c_C, -1.0, mask=c_C < C)


def scan(
    batch_slot_B: Tensor,
    batch_slots: BatchSlots,
    match_BJW: Tensor,
    *,
    depth: int,
    matches: int,
    drafters: int,
) -> None:
    """Find the `matches` best matches of each request for which all `drafters` (bits of
    `drafters_Q`) may draft. match_BJW: from `workspace`.
    """
    count = batch_slots.group_Q.shape[0]
    requests, scanners, block_width = match_BJW.shape
    assert requests == batch_slot_B.shape[0] and count <= 1 << 16
    assert block_width == triton.next_power_of_2(matches)
    _scan[(requests, scanners)](
        batch_slot_B,
        *texts_of(batch_slots),
        batch_slots.group_Q,
        batch_slots.first_Q,
        count,
        match_BJW,
        depth,
        DRAFTERS=drafters,
        W=matches,
        WP=block_width,
        QP=triton.next_power_of_2(count),
        BLOCK=BLOCK,
        MAX_MATCH=MAX_MATCH,
        MEMBERS=MEMBERS,
        STEP=STEP,
        num_warps=8,
        **PDL,
    )


def texts_of(batch_slots: BatchSlots) -> tuple[Tensor | int, ...]:
    """Return the texts, and the inputs of `draft_limit`."""
    return (
        batch_slots.token_QT,
        batch_slots.token_QT.shape[1],
        batch_slots.length_Q,
        batch_slots.limit_Q,
        batch_slots.capacity_Q,
        batch_slots.done_Q,
        batch_slots.drafters_Q,
        batch_slots.max_depth_Q,
    )


def history_nodes(
    batch_slot_B: Tensor,
    batch_slots: BatchSlots,
    nodes: Nodes,
    calibration: CalibrationTable,
    match_BJW: Tensor,
    *,
    depth: int,
    width: int,
    drafter: int = 0,
) -> None:
    """Fill `nodes` (at least depth * width columns) with the continuations of the `width` best
    matches, merged into a trie.

    calibration: 7 match lengths x 8 shares x 8 depths. acceptance = the parent's times the table at
    (match length, share of the parent's matches that agree, depth). Column d * width + m is the
    node of depth d + 1 that match m was the first to reach. Matches less than half as long as the
    longest are dropped. `drafter`: its bit of `drafters_Q`.
    """
    requests, columns = nodes.acceptance_BC.shape
    assert depth * width <= columns
    assert calibration.prior_Z.shape[0] >= LENGTHS * SHARES * DEPTHS
    scan(batch_slot_B, batch_slots, match_BJW, depth=depth, matches=width, drafters=1 << drafter)
    _merge[(requests,)](
        batch_slot_B,
        *texts_of(batch_slots),
        match_BJW,
        *nodes,
        columns,
        calibration.acceptance_Z,
        depth,
        DRAFTERS=1 << drafter,
        W=width,
        WP=match_BJW.shape[2],
        J=match_BJW.shape[1],
        DP=triton.next_power_of_2(depth),
        SHARES=SHARES,
        DEPTHS=DEPTHS,
        CERTAIN=CERTAIN,
        BLOCK=128,
        num_warps=2,
        **PDL,
    )
