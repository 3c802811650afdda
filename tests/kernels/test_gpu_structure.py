"""Masks of structured outputs: only tokens whose bit is set keep their logit, in any company."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.triton_tests import DEVICE  # isort: skip
from tlt_kernels.gpu.structure import Masks, apply_masks

ROWS = 5


@pytest.mark.parametrize("vocabulary", [1, 31, 64, 1024, 2079])
def test_only_tokens_that_may_follow_stay(vocabulary: int) -> None:
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
    apply_masks(found_SV, torch.from_numpy(row_S).to(DEVICE), masks)
    expected_SV = logits_SV.copy()
    for s, mask in enumerate(mask_S):
        if mask >= 0 and row_S[s] >= 0:
            expected_SV[s, ~may_MV[mask]] = -np.inf
    np.testing.assert_array_equal(found_SV.cpu().numpy(), expected_SV)
