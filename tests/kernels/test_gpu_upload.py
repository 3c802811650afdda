"""Uploads: one copy tells the device about a step, and the device applies what the host meant."""

from __future__ import annotations

import numpy as np
import torch

from tests.kernels.triton_tests import DEVICE, gpu  # isort: skip
from tests.kernels.tree_twins import numpy_of
from tlt_kernels.filters import Filters
from tlt_kernels.gpu.tensors import BatchSlots
from tlt_kernels.gpu.upload import Upload, apply
from tlt_kernels.gpu.upload_layout import UploadLayout

LAYOUT = UploadLayout(
    batch=5, chunks=3, admissions=4, extensions=6, stops=3, payload=3000, idle=7, texts=2
)


def make(tokens: int = 2500) -> tuple[BatchSlots, Upload, np.ndarray]:
    batch_slots = BatchSlots.allocate(
        8, tokens, hidden=6, texts=2, stops=3, dtype=torch.float32, device=DEVICE
    )
    buffer_U = np.full(LAYOUT.size, -77, np.int32)
    return batch_slots, Upload(LAYOUT, buffer_U), buffer_U


def send(upload: Upload, buffer_U: np.ndarray) -> torch.Tensor:
    device_U = torch.full((LAYOUT.size,), -99, dtype=torch.int32, device=DEVICE)
    device_U[: upload.used] = torch.from_numpy(buffer_U[: upload.used]).to(DEVICE)
    return device_U


def test_uploaded_admissions_and_pages_arrive() -> None:
    rng = np.random.default_rng(0)
    batch_slots, upload, buffer_U = make()
    page_hint_PH = torch.randn(300, 6, device=DEVICE)
    expected = BatchSlots(*numpy_of(batch_slots))
    for batch_slot, length, first_page in ((3, 5, 10), (0, 2100, 20)):
        tokens = rng.integers(0, 1000, length).astype(np.int32)
        pages = list(range(first_page, first_page + -(-length // 16)))
        seed = int(rng.integers(0, 2**64, dtype=np.uint64)) | 1 << 63 | 1 << 31
        assert upload.admit(
            batch_slot,
            tokens,
            pages,
            limit=length + 9,
            seed=seed,
            temperature=0.7,
            filters=Filters(min_p=0.05, top_k=40, top_p=0.9),
            stop_ids=[2, 11],
            drafters=int(batch_slot == 0),
            max_depth=batch_slot + 3,
            max_rows=batch_slot + 5,
            group=batch_slot + 4,
            first=batch_slot + 7,
            hint_page=12 if batch_slot == 3 else -1,
            adapter=batch_slot - 1,
        )
        expected.token_QT[batch_slot, :length] = tokens
        expected.page_table_QP[batch_slot, : len(pages)] = pages
        expected.seed_Q[batch_slot] = np.array([seed], np.uint64).view(np.int64)[0]
        for name, value in (
            ("length", length),
            ("limit", length + 9),
            ("capacity", len(pages) * 16),
            ("temperature", 0.7),
            ("done", 0),
            ("drafters", batch_slot == 0),
            ("max_depth", batch_slot + 3),
            ("max_rows", batch_slot + 5),
            ("group", batch_slot + 4),
            ("first", batch_slot + 7),
            ("adapter", batch_slot - 1),
        ):
            getattr(expected, f"{name}_Q")[batch_slot] = value
        expected.filters_QF[batch_slot] = Filters(min_p=0.05, top_k=40, top_p=0.9).words()
        expected.stop_QK[batch_slot] = 2, 11, -1
        expected.hint_QH[batch_slot] = page_hint_PH[12].cpu().numpy() if batch_slot == 3 else 0
    text = rng.integers(0, 1000, 600).astype(np.int32)
    assert upload.keep_text(9, 33, text)
    expected.token_QT[9, :600], expected.length_Q[9], expected.group_Q[9] = text, 600, 33
    assert upload.extend_pages(5, 2, [77, 78])
    expected.page_table_QP[5, 2:4] = 77, 78
    expected.capacity_Q[5] = 64
    apply(send(upload, buffer_U), LAYOUT, batch_slots, page_hint_PH)
    for name, array in expected._asdict().items():
        np.testing.assert_array_equal(
            getattr(BatchSlots(*numpy_of(batch_slots)), name), array, err_msg=name
        )


def test_upload_buffer_contains_the_batch() -> None:
    _, upload, buffer_U = make()
    upload.batch([4, 2], [(1, 16, 30), (6, 0, 5)])
    assert not upload.changes
    device_U = send(upload, buffer_U)
    assert LAYOUT.batch_slot_B(device_U, 4).tolist() == [4, 2, 7, 7]
    assert [t.tolist() for t in LAYOUT.chunks_W(device_U, 3)] == [[1, 6, 7], [16, 0, 0], [30, 5, 0]]
    upload.batch([1])
    assert LAYOUT.batch_slot_B(send(upload, buffer_U), 2).tolist() == [1, 7]


def test_upload_without_changes_keeps_every_batch_slot() -> None:
    batch_slots, upload, buffer_U = make()
    before = numpy_of(batch_slots)
    upload.extend_pages(1, 0, [3])
    upload.begin()
    apply(send(upload, buffer_U), LAYOUT, batch_slots)
    for name, array in BatchSlots(*before)._asdict().items():
        np.testing.assert_array_equal(
            getattr(BatchSlots(*numpy_of(batch_slots)), name), array, err_msg=name
        )


def test_upload_is_applied_only_once() -> None:
    batch_slots, upload, buffer_U = make()
    assert upload.admit(2, np.full(40, 7, np.int32), range(3), limit=90, seed=1)
    device_U = send(upload, buffer_U)
    apply(device_U, LAYOUT, batch_slots)
    batch_slots.length_Q[2] = 41  # a step has written
    apply(device_U, LAYOUT, batch_slots)
    assert batch_slots.length_Q[2] == 41 and batch_slots.capacity_Q[2] == 48
    upload.begin()
    assert upload.extend_pages(2, 3, [9])
    apply(send(upload, buffer_U), LAYOUT, batch_slots)
    assert batch_slots.capacity_Q[2] == 64 and batch_slots.length_Q[2] == 41, "the next upload is"


def test_a_batch_slot_is_named_once_in_an_upload() -> None:
    _, upload, _ = make()
    assert upload.extend_pages(2, 0, [9])
    assert not upload.extend_pages(2, 1, [10])
    assert upload.keep_text(8, 4, np.arange(3, dtype=np.int32))
    assert not upload.keep_text(8, 4, np.arange(3, dtype=np.int32))
    upload.begin()
    assert upload.extend_pages(2, 1, [10])


def test_upload_changes_without_room_are_refused_whole() -> None:
    _, upload, buffer_U = make()
    tokens = np.arange(1400, dtype=np.int32)
    assert upload.admit(0, tokens, range(88), limit=1500, seed=1)
    used, held = upload.used, buffer_U[: upload.used].copy()
    assert not upload.admit(1, np.arange(1500, dtype=np.int32), range(94), limit=1600, seed=1)
    assert not upload.extend_pages(2, 0, range(1600))
    assert upload.used == used and (buffer_U[:used] == held).all()
    for batch_slot in range(1, 6):
        assert upload.extend_pages(batch_slot, 0, [batch_slot])
    assert not upload.extend_pages(6, 0, [6])
    assert not upload.admit(4, tokens[:3], [9], limit=9, seed=1), "no room for its pages"


@gpu
def test_batch_slot_restarts_in_stream_order() -> None:
    batch_slots, upload, buffer_U = make()
    for length in (300, 20):
        upload.begin()
        assert upload.admit(
            2, np.full(length, length, np.int32), range(length // 16 + 1), limit=400, seed=length
        )
        apply(send(upload, buffer_U), LAYOUT, batch_slots)
    assert batch_slots.length_Q[2] == 20
    assert (batch_slots.token_QT[2, :20] == 20).all()
    assert (batch_slots.token_QT[2, 20:300] == 300).all()
