"""Masks of structured outputs on the GPU: one bit for each token that may follow a sampled row,
made by the host while the row's logits are computed. A row whose mask was not ready in time is left
out of the step: the walk does not enter such a draft, nor start from such a root.

Legend: S sampled rows, V vocabulary, M masks, W = V / 32 words of a mask, R rows, E entries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt_kernels.gpu.target import PDL, pdl_launch, pdl_wait

WORD = 32
BLOCK = 1024
NO_MASK, DRAFT_LEFT_OUT, ENTRY_LEFT_OUT = -1, -2, -3
NO_TOKEN = tl.constexpr(-2)  # differs from each sample


class Masks(NamedTuple):
    """Views of one buffer, so that one copy brings both."""

    whole: Tensor
    # Index of a sample's mask; NO_MASK, DRAFT_LEFT_OUT, or ENTRY_LEFT_OUT - e of a root's entry e.
    mask_S: Tensor
    mask_MW: Tensor  # bit t % 32 of word t / 32: token t may follow

    @staticmethod
    def allocate(samples: int, vocabulary: int, *, device: str = "cuda") -> Masks:
        words = triton.cdiv(vocabulary, WORD)
        whole = torch.full((samples * (1 + words),), -1, dtype=torch.int32, device=device)
        return Masks(whole, whole[:samples], whole[samples:].view(samples, words))


@triton.jit
def _apply_masks(
    logits_SV,
    V,
    row_S,
    mask_S,
    mask_MW,
    W,
    token_R,
    count_E,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
    DRAFT: tl.constexpr,
    ENTRY: tl.constexpr,
):
    pdl_launch()
    s = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pdl_wait()
    mask = tl.load(mask_S + s).to(tl.int64)
    row = tl.load(row_S + s)
    first = tl.program_id(0) == 0
    tl.store(token_R + row, NO_TOKEN, mask=first & (row >= 0) & (mask == DRAFT))
    tl.store(count_E + (ENTRY - mask), 0, mask=first & (row >= 0) & (mask <= ENTRY))
    if (row < 0) | (mask < 0):
        return
    word = tl.load(mask_MW + mask * W + tokens // WORD, mask=tokens < V, other=-1)
    banned = ((word >> (tokens % WORD)) & 1) == 0
    tl.store(logits_SV + s * V + tokens, -float("inf"), mask=banned & (tokens < V))


def apply_masks(
    logits_SV: Tensor,  # float32
    row_S: Tensor,  # int32, the row of the extend that the logits belong to, -1 dead
    masks: Masks,
    token_R: Tensor,  # int32, the rows' tokens
    count_E: Tensor,  # int32, the rows of each entry's tree
) -> None:
    """Set the logits of tokens that may not follow to minus infinity, in place, and remove left-out
    rows from the trees.
    """
    S, V = logits_SV.shape
    _apply_masks[(triton.cdiv(V, BLOCK), S)](
        logits_SV, V, row_S, masks.mask_S, masks.mask_MW, masks.mask_MW.shape[1], token_R, count_E,
        WORD=WORD, BLOCK=BLOCK, DRAFT=DRAFT_LEFT_OUT, ENTRY=ENTRY_LEFT_OUT, num_warps=4, **PDL,
    )  # fmt: skip
