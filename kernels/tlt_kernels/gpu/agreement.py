"""A checksum of everything that the ranks of a group must hold equal after a step: the last normed
rows, their layout, and the accepted drafts. Ranks that differ have different checksums, except with
probability 2^-64.

Integer sums do not depend on the order. The total continues from step to step, so a difference
persists. It carries the rank of a wait that ran out of time.

Legend: R rows, H hidden, E entries, F fields of an outcome, W words of 32 bits in a normed row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt_kernels.gpu.accept import HEAD
from tlt_kernels.gpu.target import PDL, lanes, pdl_launch, pdl_wait
from tlt_kernels.gpu.tensors import RowTable

# The last elements of a room of `exchange.py`: the sums are alone in their kilobyte.
SUM_FLOATS = 256


@triton.jit
def _mixed(word, at):
    """Mix the bits of a word at an index; `tlt_client.channels.checksums` has the same mixing."""
    z = (word.to(tl.uint32, bitcast=True)).to(tl.uint64)
    z += (at + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit(do_not_specialize=["R"])
def _add_states(
    word_RW,
    token_R,
    position_R,
    kv_slot_R,
    batch_slot_R,
    parent_R,
    outcome_EF,
    missed,
    total,
    R,
    W: tl.constexpr,
    F: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add one row, or one entry's outcome, per program. Dead rows may have any content."""
    pdl_launch()
    p = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    pdl_wait()
    if p == 0:
        tl.store(total + 1, tl.load(missed))
    if p < R:
        position = tl.load(position_R + p)
        alive = position >= 0
        inside = (i < W) & alive
        word = tl.load(word_RW + p.to(tl.int64) * W + i, mask=inside, other=0)
        laid = tl.where(i == W, tl.load(token_R + p), position)
        laid = tl.where(i == W + 1, tl.load(kv_slot_R + p), laid)
        laid = tl.where(i == W + 2, tl.load(batch_slot_R + p), laid)
        laid = tl.where(i == W + 3, tl.load(parent_R + p), laid)
        word = tl.where(i < W, word, laid)
        counted = (i < W + 5) & alive
    else:
        out = outcome_EF + (p - R) * F
        emitted, half = tl.load(out), (F - HEAD) // 2
        at = (i - HEAD) % half
        counted = (i < HEAD) | ((i < F) & (at < emitted))
        word = tl.load(out + i, mask=counted, other=0)
    z = _mixed(word, p.to(tl.int64) * BLOCK + i)
    added = tl.sum(tl.where(counted, z, 0), axis=0)
    tl.atomic_add(total, added.to(tl.int64, bitcast=True), sem="relaxed")


def add_states(
    hidden_RH: Tensor, rows: RowTable, outcome_EF: Tensor, missed: Tensor, total: Tensor
) -> None:
    """Add a step to the first int64 of `total`, and copy `missed`, two int32, to the second."""
    word_RW = hidden_RH.view(torch.int32)
    (count, words), (entries, fields) = word_RW.shape, outcome_EF.shape
    _add_states[(count + entries,)](
        word_RW,
        rows.token_R,
        rows.position_R,
        rows.kv_slot_R,
        rows.batch_slot_R,
        rows.parent_R,
        outcome_EF,
        missed.view(torch.int64),
        total,
        count,
        W=words,
        F=fields,
        HEAD=HEAD,
        BLOCK=lanes(triton.next_power_of_2(max(words + 5, fields))),
        num_warps=4,
        **PDL,
    )
