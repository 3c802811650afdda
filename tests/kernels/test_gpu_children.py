"""Children of draft rows against the CPU twin and a plain sort."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.triton_tests import DEVICE, assert_close, assert_same_bits, gpu
from tlt_kernels import reference
from tlt_kernels.cpu import growth
from tlt_kernels.gpu.children import children
from tlt_kernels.gpu.tensors import BatchSlots, RowTable

NEAR = 1e-4  # scores nearer than this may rank either way: G differs by some rounding


class Rows:
    def __init__(self, count: int, size: int, seed: int, spread: float = 2.0) -> None:
        draw = np.random.default_rng(seed)
        self.logits = (draw.standard_normal((count, size)) * spread).astype(np.float32)
        self.target_ids = np.sort(draw.choice(4 * size + 3, size, replace=False)).astype(np.int32)
        self.batch_slot = draw.permutation(count).astype(np.int32)
        self.position = draw.integers(0, 40_000, count).astype(np.int32)
        self.seed_of_slot = draw.integers(0, 2**64, count, dtype=np.uint64)
        self.temperature_of_slot = draw.choice(np.array([0, 0.5, 1, 1.7], np.float32), count)

    def children(self, width: int, rows: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        logits_MC, target_ids_C, batch_slot_M, position_M, seed_Q, temperature_Q = (
            torch.from_numpy(array).to(DEVICE)
            for array in (
                self.logits[rows],
                self.target_ids,
                self.batch_slot[rows],
                self.position[rows],
                self.seed_of_slot.view(np.int64),
                self.temperature_of_slot,
            )
        )
        return children(
            logits_MC,
            target_ids_C,
            RowTable.allocate(0, 1, device=DEVICE)._replace(
                batch_slot_R=batch_slot_M, position_R=position_M
            ),
            BatchSlots.allocate(1, 1, hidden=1, device=DEVICE)._replace(
                seed_Q=seed_Q, temperature_Q=temperature_Q
            ),
            width=width,
        )

    def twin(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.empty((len(self.logits), width), np.int32)
        z = np.empty((len(self.logits), width), np.float32)
        seeds = self.seed_of_slot[self.batch_slot]
        temperatures = self.temperature_of_slot[self.batch_slot]
        growth.children(
            self.logits, self.target_ids, seeds, self.position + 1, temperatures, tokens, z
        )
        return tokens, z


def check_against_twin(rows: Rows, width: int) -> None:
    token_MW, z_MW = rows.children(width)
    tokens, z = rows.twin(max(width, 2))
    present = tokens >= 0
    found = z_MW.cpu().numpy()
    assert (np.isneginf(found) == ~present).all()
    assert_close("z_MW", torch.from_numpy(found[present]), torch.from_numpy(z[present]), 1e-6)
    edge = np.full((len(z), 1), np.inf, np.float32)
    with np.errstate(invalid="ignore"):
        gap = np.minimum(
            np.concatenate([edge, z[:, :-1]], 1) - z, z - np.concatenate([z[:, 1:], -edge], 1)
        )
    clear = ~present | (gap > NEAR)
    clear[:, -1] |= z.shape[1] >= rows.logits.shape[1]
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(token_MW.cpu().numpy()[clear], tokens[clear])


@pytest.mark.parametrize(
    ("size", "width"), [(1, 1), (1, 8), (5, 2), (7, 8), (255, 3), (257, 1), (1030, 8), (2100, 4)]
)
def test_draft_children_equal_their_twin(size, width):
    check_against_twin(Rows(9, size, size + width), width)


def test_ties_keep_the_earlier_index_and_minus_zero_equals_zero():
    rows = Rows(2, 600, 1)
    rows.logits[:] = -1.0
    rows.temperature_of_slot[:] = 0
    rows.logits[:, 299], rows.logits[:, 300], rows.logits[:, 550] = -0.0, 0.0, 0.0
    token_MW, z_MW = rows.children(5)
    assert token_MW.tolist() == [rows.target_ids[[299, 300, 550, 0, 1]].tolist()] * 2
    assert z_MW.tolist() == [[0, 0, 0, -1, -1]] * 2


def test_dead_rows_and_broken_logits_have_no_children():
    rows = Rows(5, 300, 2)
    rows.position[1] = -1
    rows.logits[2] = np.nan
    rows.logits[3, 5:] = -np.inf
    rows.logits[4, ::2] = np.nan
    token_MW, z_MW = rows.children(8)
    assert (token_MW[1:3] == -1).all() and z_MW[1:3].isneginf().all()
    assert sorted(token_MW[3, :5].tolist()) == rows.target_ids[:5].tolist()
    assert token_MW[3, 5:].tolist() == [-1, -1, -1]
    assert set(token_MW[4].tolist()) <= set(rows.target_ids[1::2].tolist())


def test_best_child_is_the_sample_of_a_target_with_equal_logits():
    rows = Rows(20, 64, 3)
    rows.target_ids[:] = np.arange(64)
    rows.temperature_of_slot[:] = 1
    token_MW, _ = rows.children(2)
    for m in range(20):
        noise = reference.gumbel(
            int(rows.seed_of_slot[rows.batch_slot[m]]), np.arange(64), int(rows.position[m]) + 1
        )
        assert token_MW[m, 0] == np.argmax(rows.logits[m] + noise)


@gpu
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_real_draft_vocabulary_on_a_gpu_is_ranked_like_the_twin(width):
    check_against_twin(Rows(40, 32_000, width), width)


@gpu
def test_a_row_has_the_same_children_alone_and_among_512():
    rows = Rows(512, 32_000, 5)
    token_MW, z_MW = rows.children(8)
    for m in (0, 1, 77, 511):
        token, z = rows.children(8, slice(m, m + 1))
        assert token.tolist() == token_MW[m : m + 1].tolist()
        assert_same_bits("z_MW", z, z_MW[m : m + 1])
