"""Masks of structured outputs: only tokens whose bit is set keep their logit, in any company."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.triton_tests import DEVICE  # isort: skip
from tlt_kernels.gpu.structure import DRAFT_LEFT_OUT, ENTRY_LEFT_OUT, NO_MASK, Masks, apply_masks

ROWS = 5


@pytest.mark.parametrize("vocabulary", [1, 31, 64, 1024, 2079])
def test_masks_keep_only_tokens_allowed_to_follow(vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    logits_SV = rng.normal(size=(ROWS, vocabulary)).astype(np.float32)
    logits_SV[1] = np.nan  # masks are set without a look at the logits
    may_MV = rng.random((ROWS, vocabulary)) < 0.3
    masks = Masks.allocate(ROWS + 1, vocabulary, device=DEVICE)
    words = masks.mask_MW.shape[1]
    bits_MV = np.zeros((ROWS, words * 32), np.uint8)
    bits_MV[:, :vocabulary] = may_MV
    packed_MW = np.packbits(bits_MV, axis=1, bitorder="little").view(np.int32)
    masks.mask_MW[:ROWS] = torch.from_numpy(packed_MW).to(DEVICE)
    mask_S = np.array([3, 0, -1, 3, 1], np.int32)  # one without, two share one
    masks.mask_S[:ROWS] = torch.from_numpy(mask_S).to(DEVICE)
    row_S = np.array([4, 7, 2, -1, 0], np.int32)  # one is dead
    found_SV = torch.from_numpy(logits_SV.copy()).to(DEVICE)
    token_R, count_E = (torch.arange(1, 9, dtype=torch.int32, device=DEVICE) for _ in range(2))
    apply_masks(found_SV, torch.from_numpy(row_S).to(DEVICE), masks, token_R, count_E)
    expected_SV = logits_SV.copy()
    for s, mask in enumerate(mask_S):
        if mask >= 0 and row_S[s] >= 0:
            expected_SV[s, ~may_MV[mask]] = -np.inf
    np.testing.assert_array_equal(found_SV.cpu().numpy(), expected_SV)
    assert token_R.tolist() == count_E.tolist() == [*range(1, 9)]


def test_draft_rows_without_a_ready_mask_are_dropped() -> None:
    masks = Masks.allocate(ROWS, 2079, device=DEVICE)
    mask_S = [DRAFT_LEFT_OUT, ENTRY_LEFT_OUT - 2, NO_MASK, DRAFT_LEFT_OUT, ENTRY_LEFT_OUT]
    masks.mask_S[:] = torch.tensor(mask_S, dtype=torch.int32)
    logits_SV = torch.zeros(ROWS, 2079, device=DEVICE)
    row_S = torch.tensor([4, 2, 3, -1, -1], dtype=torch.int32, device=DEVICE)
    token_R, count_E = (torch.arange(1, 9, dtype=torch.int32, device=DEVICE) for _ in range(2))
    apply_masks(logits_SV, row_S, masks, token_R, count_E)
    assert token_R.tolist() == [1, 2, 3, 4, -2, 6, 7, 8]
    assert count_E.tolist() == [1, 2, 0, 4, 5, 6, 7, 8]
    assert not logits_SV.any()
