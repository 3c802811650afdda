"""Edits of logits against the CPU sampler's, bit for bit: random text, trees, penalties, lists."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.kernels.triton_tests import DEVICE, assert_same_bits  # isort: skip
from tests.kernels.tree_twins import numpy_of
from tlt_kernels.cpu.sampling import edit_row
from tlt_kernels.gpu.accept import HEAD, fields
from tlt_kernels.gpu.edits import count_emitted, count_text, edit
from tlt_kernels.gpu.tensors import ALLOWED, IN_PROMPT, BatchSlots, PrefillChunks, RowTable
from tlt_kernels.gpu.upload import Edits, Upload, apply
from tlt_kernels.gpu.upload_layout import UploadLayout

V, DEPTH, TOKENS = 1100, 3, 96
LAYOUT = UploadLayout(
    batch=4, chunks=2, admissions=4, extensions=4, stops=2, payload=1200, idle=4, listed=60
)
PENALTIES = [(1.3, 0.4, 0.2), (1.0, 0.0, -0.7), (0.8, -1.1, 0.0), (1.0, 0.0, 0.0)]


class Text(NamedTuple):
    """A sequence in a batch slot."""

    tokens: np.ndarray
    edits: Edits


def text(rng: np.random.Generator, penalties: tuple[float, float, float], allowed: int = 0) -> Text:
    """Few different tokens, so that counts are above one; a token with a bias is also masked."""
    length = int(rng.integers(8, 40))
    tokens = rng.choice([0, 5, 7, 1023, 1024, V - 1, *range(20, 30)], length).astype(np.int32)
    listed = rng.permutation(V)[:30]
    listed[0] = tokens[0]
    return Text(
        tokens,
        Edits(
            *penalties,
            prompt=int(rng.integers(1, length)),
            masked_to=length + int(rng.integers(0, 4)),
            bias_ids=listed[:20],
            bias=rng.normal(0, 4, 20).astype(np.float32),
            mask_ids=listed[15:],
            allowed_ids=rng.permutation(V)[:allowed],
        ),
    )


def admitted(texts: list[Text], batch_slots: BatchSlots) -> None:
    """Text q starts in batch slot q."""
    upload = Upload(LAYOUT, np.full(LAYOUT.size, -77, np.int32))
    for q, (tokens, edits) in enumerate(texts):
        assert upload.admit(q, tokens, range(6), limit=TOKENS, seed=q, edits=edits)
    apply(torch.from_numpy(upload.buffer_U).to(DEVICE), LAYOUT, batch_slots)


def empty() -> BatchSlots:
    made = BatchSlots.allocate(
        5, TOKENS, hidden=4, stops=2, listed=60, vocabulary=V, dtype=torch.float32, device=DEVICE
    )
    made.count_QV.fill_(77)  # counts of an earlier sequence
    return made


def twin(given: Text, logits_V: np.ndarray, position: int, path: list[int]) -> np.ndarray:
    tokens, edits = given
    prompt_V, count_V = np.zeros(V, np.uint8), np.zeros(V, np.int32)
    prompt_V[tokens[: edits.prompt]] = 1
    np.add.at(count_V, tokens[edits.prompt :], 1)
    edited_V = np.empty(V, np.float32)
    edit_row(
        logits_V,
        edits.bias_ids,
        edits.bias,
        prompt_V,
        count_V,
        np.array([*path, -1], np.int32),
        *(np.float32(value) for value in edits[:3]),
        edits.mask_ids if position < edits.masked_to else np.zeros(0, np.int64),
        edited_V,
    )
    if len(edits.allowed_ids):
        edited_V[np.setdiff1d(np.arange(V), edits.allowed_ids)] = -np.inf
    return edited_V


def trees(rng: np.random.Generator, texts: list[Text]) -> tuple[RowTable, list[list[int]]]:
    """Return five rows per text, in a random tree of known tokens, and each row's path."""
    rows, paths, tokens = RowTable.allocate(5 * len(texts) + 1, DEPTH, device="cpu"), [], []
    for q, (known, _) in enumerate(texts):
        root = len(paths)
        for i in range(5):
            parent = int(rng.integers(max(0, i - 2), i)) if i else -1
            if parent >= 0 and len(paths[root + parent]) == DEPTH:
                parent = 0
            token = int(rng.choice([*known[:3], 11]))
            row = len(paths)
            paths.append([*paths[root + parent], token] if i else [])
            tokens.append(token)
            rows.token_R[row] = token if i else int(known[-1])
            rows.position_R[row] = len(known) - 1 + len(paths[row])
            rows.batch_slot_R[row], rows.base_R[row] = q, len(known)
            rows.parent_R[row] = root + parent if i else -1
    # The last row of a prefill chunk: its parent is no draft.
    rows.token_R[-1], rows.position_R[-1] = int(texts[0][0][-1]), len(texts[0][0]) - 1
    rows.batch_slot_R[-1], rows.base_R[-1] = 0, len(texts[0][0])
    rows.parent_R[-1] = 2
    return RowTable(*(t.to(DEVICE) for t in rows)), [*paths, []]


@pytest.mark.parametrize("seed", range(3))
def test_tree_row_edits_have_the_bits_of_the_cpu_sampler(seed: int) -> None:
    rng = np.random.default_rng(seed)
    texts = [text(rng, penalties, int(rng.integers(0, 2)) * 9) for penalties in PENALTIES]
    batch_slots = empty()
    admitted(texts, batch_slots)
    count_text(batch_slots)
    rows, paths = trees(rng, texts)
    order = rng.permutation(len(paths))
    row_S = np.where(rng.random(len(order)) < 0.2, -1, order).astype(np.int32)
    row_S[-1] = len(paths) - 1  # once more, or for the first time
    logits_SV = (rng.standard_normal((len(row_S), V)) * 3).astype(np.float32)
    logits_SV[0, 5], logits_SV[1, 7] = np.inf, np.nan
    expected_SV, position_R = logits_SV.copy(), rows.position_R.tolist()
    for s, row in enumerate(row_S.tolist()):
        if row >= 0:
            given = texts[int(rows.batch_slot_R[row])]
            expected_SV[s] = twin(given, logits_SV[s], position_R[row] + 1, paths[row])
    found_SV = torch.tensor(logits_SV, device=DEVICE)
    edit(found_SV, torch.from_numpy(row_S).to(DEVICE), rows, batch_slots)
    assert max(map(len, paths)) == DEPTH and (expected_SV != logits_SV).any(axis=1).sum() > 8
    both_nan = found_SV.cpu().isnan() & torch.from_numpy(expected_SV).isnan()
    assert_same_bits(
        "logits_SV",
        torch.where(both_nan, 0.0, found_SV.cpu()),
        torch.where(both_nan, 0.0, torch.from_numpy(expected_SV)),
    )


def counted(texts: list[Text]) -> np.ndarray:
    count_QV = np.zeros((len(texts), V), np.int32)
    for q, (tokens, edits) in enumerate(texts):
        if edits[:3] != (1.0, 0.0, 0.0) or len(edits.allowed_ids):
            count_QV[q, tokens[: edits.prompt]] = IN_PROMPT
            count_QV[q, edits.allowed_ids] |= ALLOWED
            np.add.at(count_QV[q], tokens[edits.prompt :], 1)
        else:
            count_QV[q] = 77  # never made
    return count_QV


def test_token_counts_are_built_once_and_grow_with_new_tokens() -> None:
    rng = np.random.default_rng(9)
    some = zip(PENALTIES, (0, 9, 3, 0), strict=True)
    texts = [text(rng, penalties, allowed) for penalties, allowed in some]
    batch_slots = empty()
    admitted(texts, batch_slots)
    count_text(batch_slots)
    np.testing.assert_array_equal(batch_slots.count_QV[:4].cpu().numpy(), counted(texts))
    assert not batch_slots.uncounted_Q.any()
    batch_slot_B = torch.tensor([2, 3, 4], dtype=torch.int32, device=DEVICE)  # the last is padding
    chunks = PrefillChunks(*(torch.tensor([1, 4], dtype=torch.int32, device=DEVICE) for _ in "abc"))
    for _ in range(3):
        outcome_EF = np.full((5, fields(DEPTH)), 9, np.int32)
        for e, q in enumerate([2, 3, 4, 1, 4]):
            count = int(rng.integers(0, DEPTH + 2)) if q < 4 else 0
            tokens = rng.choice([5, 7, 21], DEPTH + 1).astype(np.int32)
            outcome_EF[e, 0], outcome_EF[e, HEAD : HEAD + DEPTH + 1] = count, tokens
            if count:
                emitted = np.append(texts[q].tokens, tokens[:count])
                texts[q] = texts[q]._replace(tokens=emitted)
        count_emitted(batch_slot_B, chunks, batch_slots, torch.from_numpy(outcome_EF).to(DEVICE))
        count_text(batch_slots)
        np.testing.assert_array_equal(batch_slots.count_QV[:4].cpu().numpy(), counted(texts))
    assert (batch_slots.count_QV[4] == 77).all(), "the idle batch slot counts nothing"


def test_restarted_sequence_is_counted_again() -> None:
    rng = np.random.default_rng(3)
    batch_slots = empty()
    for _ in range(2):
        texts = [text(rng, PENALTIES[0]), text(rng, PENALTIES[3])]
        admitted(texts, batch_slots)
        assert batch_slots.uncounted_Q.tolist() == [1, 0, 0, 0, 0]
        count_text(batch_slots)
        np.testing.assert_array_equal(batch_slots.count_QV[:2].cpu().numpy(), counted(texts))
    listed_QL, edits = numpy_of(batch_slots).listed_QL, texts[1].edits
    assert listed_QL[1, :35].tolist() == [*edits.bias_ids, *edits.mask_ids]


def test_only_allowed_tokens_stay_when_no_penalty_is_set() -> None:
    rng = np.random.default_rng(5)
    texts = [text(rng, PENALTIES[3], 9), text(rng, PENALTIES[3])]
    batch_slots = empty()
    admitted(texts, batch_slots)
    assert batch_slots.uncounted_Q.tolist() == [1, 0, 0, 0, 0]
    count_text(batch_slots)
    rows, paths = trees(rng, texts)
    row_S = torch.arange(10, dtype=torch.int32, device=DEVICE)
    logits_SV = torch.zeros(10, V, device=DEVICE)
    edit(logits_SV, row_S, rows, batch_slots)
    finite_SV = logits_SV.isfinite().cpu().numpy()
    masked = np.array([texts[0].edits.masked_to > len(texts[0].tokens) + len(p) for p in paths[:5]])
    for s in range(5):
        hidden = texts[0].edits.mask_ids if masked[s] else []
        assert {*np.flatnonzero(finite_SV[s])} == {*texts[0].edits.allowed_ids} - {*hidden}
    assert (finite_SV[5:].sum(axis=1) >= V - 15).all()
