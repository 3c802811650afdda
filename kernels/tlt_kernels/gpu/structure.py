"""Masks of structured outputs on the GPU: of each sampled row the tokens that may follow, a bit
each, made by the host while the row's logits are computed.

Legend: S sampled rows, V vocabulary, M masks, W = V / 32 words of a mask.
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


class Masks(NamedTuple):
    """Views of one buffer, so that one copy brings both."""

    whole: Tensor
    mask_S: Tensor  # index of a sample's mask; -1 = none
    mask_MW: Tensor  # bit t % 32 of word t / 32: token t may follow

    @staticmethod
    def allocate(samples: int, vocabulary: int, *, device: str = "cuda") -> Masks:
        words = triton.cdiv(vocabulary, WORD)
        whole = torch.full((samples * (1 + words),), -1, dtype=torch.int32, device=device)
        return Masks(whole, whole[:samples], whole[samples:].view(samples, words))


@triton.jit
def _apply_masks(logits_SV, V, row_S, mask_S, mask_MW, W, WORD: tl.constexpr, BLOCK: tl.constexpr):
    pdl_launch()
    s = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pdl_wait()
    mask = tl.load(mask_S + s).to(tl.int64)
    if (tl.load(row_S + s) < 0) | (mask < 0):
        return
    word = tl.load(mask_MW + mask * W + tokens // WORD, mask=tokens < V, other=-1)
    banned = ((word >> (tokens % WORD)) & 1) == 0
    tl.store(logits_SV + s * V + tokens, -float("inf"), mask=banned & (tokens < V))


def apply_masks(
    logits_SV: Tensor,  # float32
    row_S: Tensor,  # int32, the row of the extend that the logits belong to, -1 dead
    masks: Masks,
) -> None:
    """Set the logits of tokens that may not follow to minus infinity, in place."""
    S, V = logits_SV.shape
    _apply_masks[(triton.cdiv(V, BLOCK), S)](
        logits_SV, V, row_S, masks.mask_S, masks.mask_MW, masks.mask_MW.shape[1],
        WORD=WORD, BLOCK=BLOCK, num_warps=4, **PDL,
    )  # fmt: skip
