"""Edits of logits on the GPU, in place before sampling: biases, penalties, the min_tokens mask and
allowed tokens, with the bits of `tlt_kernels.cpu.sampling.edit_row`. A ban is a bias.

A batch slot has a row of counts over the vocabulary. It is made from the slot's text in the first
step that edits (`count_text`) and updated with each step's emitted tokens (`count_emitted`). A row
of a draft tree also counts the tokens on its path. Only a step with such a request launches any of
this. Here the mask precedes the penalties: they leave minus infinity unchanged.

Legend: as in `tensors.py`; V vocabulary, L listed tokens, F fields of an outcome.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tlt_kernels.gpu.accept import HEAD
from tlt_kernels.gpu.target import PDL, pdl_launch, pdl_wait
from tlt_kernels.gpu.tensors import ALLOWED, IN_PROMPT, BatchSlots, PrefillChunks, RowTable

TEXT_BLOCK, LIST_BLOCK, BLOCK = 4096, 256, 1024


@triton.jit
def _penalties(repetition_Q, presence_Q, frequency_Q, batch_slot):
    """Return (whether there are any penalties, repetition, presence, frequency)."""
    repetition, presence, frequency = (
        tl.load(repetition_Q + batch_slot),
        tl.load(presence_Q + batch_slot),
        tl.load(frequency_Q + batch_slot),
    )
    return (
        (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0),
        repetition,
        presence,
        frequency,
    )


@triton.jit
def _count_text(
    token_QT, T, length_Q, prompt_Q, uncounted_Q, count_QV, V,
    biases_Q, masks_Q, allowed_Q, listed_QL,
    IN_PROMPT: tl.constexpr, ALLOWED: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Make one batch slot's counts per program, from its text and its allowed tokens."""
    pdl_launch()
    q = tl.program_id(0).to(tl.int64)
    i_I = tl.arange(0, BLOCK)
    pdl_wait()
    if tl.load(uncounted_Q + q) == 0:
        return
    length, prompt = tl.load(length_Q + q), tl.load(prompt_Q + q)
    for first in range(0, V, BLOCK):
        tl.store(count_QV + q * V + first + i_I, 0, mask=first + i_I < V)
    tl.debug_barrier()
    for first in range(0, length, BLOCK):
        at_I = first + i_I
        token_I = tl.load(token_QT + q * T + at_I, mask=at_I < length, other=0)
        tl.atomic_or(count_QV + q * V + token_I, IN_PROMPT, mask=at_I < prompt, sem="relaxed")
        tl.atomic_add(
            count_QV + q * V + token_I, 1, mask=(at_I >= prompt) & (at_I < length), sem="relaxed"
        )
    at, allowed = tl.load(biases_Q + q) + tl.load(masks_Q + q), tl.load(allowed_Q + q)
    for first in range(0, allowed, BLOCK):
        inside_I = first + i_I < allowed
        token_I = tl.load(listed_QL + q * L + at + first + i_I, mask=inside_I, other=0)
        tl.atomic_or(count_QV + q * V + token_I, ALLOWED, mask=inside_I, sem="relaxed")
    tl.store(uncounted_Q + q, 0)


def count_text(batch_slots: BatchSlots) -> None:
    """Make the counts of batch slots whose text was not counted yet."""
    count_QV = batch_slots.count_QV
    _count_text[(len(count_QV),)](
        batch_slots.token_QT,
        batch_slots.token_QT.shape[1],
        batch_slots.length_Q,
        batch_slots.prompt_Q,
        batch_slots.uncounted_Q,
        count_QV,
        count_QV.shape[1],
        batch_slots.biases_Q,
        batch_slots.masks_Q,
        batch_slots.allowed_Q,
        batch_slots.listed_QL,
        IN_PROMPT=IN_PROMPT,
        ALLOWED=ALLOWED,
        L=batch_slots.listed_QL.shape[1],
        BLOCK=TEXT_BLOCK,
        num_warps=8,
        **PDL,
    )


@triton.jit
def _edit_listed(
    logits_SV, V, row_S, token_R, position_R, batch_slot_R, base_R, parent_R,
    masked_to_Q, biases_Q, masks_Q, listed_QL, bias_QL, path_SD,
    L: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the biases of one row per program, mask its tokens, and list the tokens on its path."""
    pdl_launch()
    s = tl.program_id(0).to(tl.int64)
    i_I = tl.arange(0, BLOCK)
    pdl_wait()
    row = tl.load(row_S + s)
    if row < 0:
        return
    batch_slot = tl.load(batch_slot_R + row).to(tl.int64)
    position = tl.load(position_R + row) + 1  # the sampled token's
    biases, masks = tl.load(biases_Q + batch_slot), tl.load(masks_Q + batch_slot)
    masks = tl.where(position < tl.load(masked_to_Q + batch_slot), masks, 0)
    logits_V, listed_L = logits_SV + s * V, listed_QL + batch_slot * L
    for first in range(0, biases, BLOCK):
        inside_I = first + i_I < biases
        at_I = logits_V + tl.load(listed_L + first + i_I, mask=inside_I, other=0)
        bias_I = tl.load(bias_QL + batch_slot * L + first + i_I, mask=inside_I, other=0.0)
        tl.store(at_I, tl.load(at_I, mask=inside_I, other=0.0) + bias_I, mask=inside_I)
    tl.debug_barrier()  # a token may be in both lists
    for first in range(biases, biases + masks, BLOCK):
        inside_I = first + i_I < biases + masks
        at_I = logits_V + tl.load(listed_L + first + i_I, mask=inside_I, other=0)
        tl.store(at_I, -float("inf"), mask=inside_I)
    for d in range(0, tl.minimum(position - tl.load(base_R + row), D)):
        tl.store(path_SD + s * D + d, tl.load(token_R + row))
        row = tl.load(parent_R + row)


@triton.jit
def _penalise(
    logits_SV, V, row_S, position_R, batch_slot_R, base_R, path_SD,
    repetition_Q, presence_Q, frequency_Q, allowed_Q, count_QV,
    IN_PROMPT: tl.constexpr, ALLOWED: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Penalise one block of a row per program, and mask tokens that are not allowed. Logits of
    tokens that did not occur are not read.
    """
    pdl_launch()
    s = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pdl_wait()
    row = tl.load(row_S + s)
    if row < 0:
        return
    batch_slot = tl.load(batch_slot_R + row).to(tl.int64)
    penalised, repetition, presence, frequency = _penalties(
        repetition_Q, presence_Q, frequency_Q, batch_slot
    )
    restricted = tl.load(allowed_Q + batch_slot) > 0
    if not (penalised | restricted):
        return
    depth = tl.load(position_R + row) + 1 - tl.load(base_R + row)
    count = tl.load(count_QV + batch_slot * V + tokens, mask=tokens < V, other=0)
    for d in tl.static_range(D):
        on_path = tl.load(path_SD + s * D + d, mask=d < depth, other=-1)
        count += (tokens == on_path).to(tl.int32)
    banned = restricted & ((count & ALLOWED) == 0)
    count = count & (2 * IN_PROMPT - 1 - ALLOWED)
    occurs = count != 0
    count = count & (IN_PROMPT - 1)
    at = logits_SV + s * V + tokens
    x = tl.load(at, mask=occurs, other=0.0)
    x = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
    x = tl.where(count > 0, x - (frequency * count.to(tl.float32) + presence), x)
    tl.store(at, tl.where(banned, -float("inf"), x), mask=(occurs | banned) & (tokens < V))


def edit(
    logits_SV: Tensor,  # float32
    row_S: Tensor,  # int32, the row of the extend that the logits belong to, -1 dead
    rows: RowTable,
    batch_slots: BatchSlots,
) -> None:
    """Edit the logits of every sampled row in place. The counts must be made (`count_text`)."""
    S, V = logits_SV.shape
    path_SD = row_S.new_empty((S, rows.path_RD.shape[1]))
    _edit_listed[(S,)](
        logits_SV, V, row_S,
        rows.token_R, rows.position_R, rows.batch_slot_R, rows.base_R, rows.parent_R,
        batch_slots.masked_to_Q, batch_slots.biases_Q, batch_slots.masks_Q,
        batch_slots.listed_QL, batch_slots.bias_QL, path_SD,
        L=batch_slots.listed_QL.shape[1], D=path_SD.shape[1], BLOCK=LIST_BLOCK, num_warps=1, **PDL,
    )  # fmt: skip
    # Without fused multiply-adds, which round once where the twin rounds twice.
    _penalise[(triton.cdiv(V, BLOCK), S)](
        logits_SV, V, row_S, rows.position_R, rows.batch_slot_R, rows.base_R, path_SD,
        batch_slots.repetition_Q, batch_slots.presence_Q, batch_slots.frequency_Q,
        batch_slots.allowed_Q, batch_slots.count_QV,
        IN_PROMPT=IN_PROMPT, ALLOWED=ALLOWED, D=path_SD.shape[1], BLOCK=BLOCK, num_warps=4,
        enable_fp_fusion=False, **PDL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["B"])
def _count_emitted(
    batch_slot_B, batch_slot_W, B, repetition_Q, presence_Q, frequency_Q, outcome_EF, count_QV, V,
    F: tl.constexpr, HEAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Count the tokens of one entry per program."""
    pdl_launch()
    e = tl.program_id(0)
    i_I = tl.arange(0, TILE)
    pdl_wait()
    batch_slot = tl.load(batch_slot_B + e, mask=e < B, other=0)
    if e >= B:
        batch_slot = tl.load(batch_slot_W + e - B)
    penalised, _, _, _ = _penalties(repetition_Q, presence_Q, frequency_Q, batch_slot)
    if not penalised:
        return
    emitted_I = i_I < tl.load(outcome_EF + e * F)
    token_I = tl.load(outcome_EF + e * F + HEAD + i_I, mask=emitted_I, other=0)
    at_I = count_QV + batch_slot.to(tl.int64) * V + token_I
    tl.atomic_add(at_I, 1, mask=emitted_I, sem="relaxed")


def count_emitted(
    batch_slot_B: Tensor,
    chunks: PrefillChunks | None,
    batch_slots: BatchSlots,
    outcome_EF: Tensor,  # as `accept` wrote it
) -> None:
    """Count the tokens that the entries of a step emitted."""
    entries, width = outcome_EF.shape
    _count_emitted[(entries,)](
        batch_slot_B,
        chunks.batch_slot_W if chunks else batch_slot_B,
        len(batch_slot_B),
        batch_slots.repetition_Q,
        batch_slots.presence_Q,
        batch_slots.frequency_Q,
        outcome_EF,
        batch_slots.count_QV,
        batch_slots.count_QV.shape[1],
        F=width,
        HEAD=HEAD,
        TILE=triton.next_power_of_2((width - HEAD) // 2),
        num_warps=1,
        **PDL,
    )
