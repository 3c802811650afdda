"""Uploads: the host's changes for a step, in one buffer and one copy: the batch, newly started
sequences and new pages.

The host fills an `Upload` (plain numpy over pinned memory) and copies its first `used` ints to the
device's buffer of the same layout. `apply` writes it to the batch slots, once. Graphs read the
batch (`batch_slot_B`, chunks) directly from that buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from tlt_kernels.filters import NO_FILTERS, Filters
from tlt_kernels.gpu.target import PDL, pdl_launch, pdl_wait
from tlt_kernels.gpu.tensors import PAGE_SIZE, BatchSlots
from tlt_kernels.gpu.upload_layout import ADMISSION, EXTENSION, HEADER, TEXT, UploadLayout, rounded

PROGRAMS = 32
ANY_DRAFTER = -1  # every bit is set
UNLIMITED = 2**30


class Edits(NamedTuple):
    """The edits of a sequence's logits, see `tlt_kernels.gpu.edits`."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    prompt: int = 0  # tokens of the prompt
    masked_to: int = 0  # first position at which the masked tokens are allowed
    bias_ids: NDArray[np.int64] = np.zeros(0, np.int64)
    bias: NDArray[np.float32] = np.zeros(0, np.float32)
    mask_ids: NDArray[np.int64] = np.zeros(0, np.int64)
    allowed_ids: NDArray[np.int64] = np.zeros(0, np.int64)  # empty: all


NO_EDITS = Edits()


class Upload:
    """The host's side of one buffer. `begin` starts over. `admit` and `extend_pages` return False,
    with nothing written, when they do not fit.

    An upload names a batch slot once, because the device's programs apply it in no order.
    """

    def __init__(self, layout: UploadLayout, buffer_U: NDArray[np.int32]) -> None:
        assert buffer_U.shape == (layout.size,) and buffer_U.dtype == np.int32
        self.layout, self.buffer_U = layout, buffer_U
        chunks, each = layout.chunks_at, rounded(layout.chunks)
        self._batch_slot_B = buffer_U[HEADER : HEADER + layout.batch]
        self._batch_slot_W, self._start_W, self._count_W = (
            buffer_U[chunks + i * each : chunks + i * each + layout.chunks] for i in range(3)
        )
        width = ADMISSION + layout.stops
        self._admission_AF = buffer_U[
            layout.admissions_at : layout.admissions_at + layout.admissions * width
        ].reshape(-1, width)
        extensions = buffer_U[
            layout.extensions_at : layout.extensions_at + layout.extensions * EXTENSION
        ]
        self._extension_XF = extensions.reshape(-1, EXTENSION)
        self._text_YF = buffer_U[layout.texts_at : layout.payload_at].reshape(-1, TEXT)
        self.begin()

    def begin(self) -> None:
        """Start an empty upload: every batch slot is idle and nothing changes."""
        self._admissions = self._extensions = self._texts = self._payload = 0
        self._named = set[int]()
        self.buffer_U[:HEADER] = 0
        self.batch(())

    @property
    def used(self) -> int:
        """Return the number of ints to copy."""
        return self.layout.payload_at + self._payload if self.changes else self.layout.admissions_at

    @property
    def changes(self) -> bool:
        """Return True if `apply` is needed. The batch alone needs only the copy."""
        return bool(self._admissions or self._extensions or self._texts)

    def batch(
        self, batch_slot_B: Sequence[int], chunks: Sequence[tuple[int, int, int]] = ()
    ) -> None:
        """Set the decoding batch slots in batch order (the rest of the bucket is idle), and the
        prefill chunks (batch slot, start, count).
        """
        self._batch_slot_B[: len(batch_slot_B)] = batch_slot_B
        self._batch_slot_B[len(batch_slot_B) :] = self.layout.idle
        self._batch_slot_W[:], self._start_W[:], self._count_W[:] = self.layout.idle, 0, 0
        for w, chunk in enumerate(chunks):
            self._batch_slot_W[w], self._start_W[w], self._count_W[w] = chunk

    def admit(
        self,
        batch_slot: int,
        tokens: NDArray[np.int32],
        pages: Sequence[int],
        *,
        limit: int,
        seed: int,
        temperature: float = 1.0,
        filters: Filters = NO_FILTERS,
        stop_ids: Sequence[int] = (),
        drafters: int = ANY_DRAFTER,
        max_depth: int = UNLIMITED,
        max_rows: int = UNLIMITED,
        group: int = -1,
        first: int = 0,
        hint_page: int = -1,
        edits: Edits = NO_EDITS,
        adapter: int = -1,
    ) -> bool:
        """Start a sequence. `tokens`: all its tokens, prompt and earlier output. `pages`: of its
        first positions.

        drafters, max_depth, max_rows, group, first, adapter: as in `BatchSlots`. hint_page: the
        page before its first uncomputed position, whose stored feature becomes the sequence's; -1 =
        none.
        """
        assert len(stop_ids) <= self.layout.stops, (
            f"{len(stop_ids)} stop ids, a batch slot holds {self.layout.stops}"
        )
        biases, masks, allowed = map(len, (edits.bias_ids, edits.mask_ids, edits.allowed_ids))
        assert biases + masks + allowed <= self.layout.listed, (
            f"{biases} biases, {masks} masks and {allowed} allowed tokens, a batch slot holds "
            f"{self.layout.listed}"
        )
        needed = len(tokens) + len(pages) + 2 * biases + masks + allowed
        if (
            self._admissions == self.layout.admissions
            or self._payload + needed > self.layout.payload
        ):
            return False
        if not self.extend_pages(batch_slot, 0, pages):
            return False
        record_F = self._admission_AF[self._admissions]
        record_F[:4] = batch_slot, len(tokens), self._store(np.asarray(tokens, np.int32)), limit
        record_F[4:6] = np.array([seed], np.uint64).view(np.int32)
        record_F[6] = np.float32(temperature).view(np.int32)
        record_F[9:16] = adapter, drafters, max_depth, max_rows, group, first, hint_page
        record_F[16:19] = np.array(edits[:3], np.float32).view(np.int32)
        bias = np.ascontiguousarray(edits.bias, np.float32).view(np.int32)
        lists = self._store(
            np.concatenate([edits.bias_ids, edits.mask_ids, edits.allowed_ids, bias])
        )
        record_F[7:9] = allowed, lists
        record_F[19:23] = edits.prompt, edits.masked_to, biases, masks
        record_F[23:ADMISSION] = filters.words()
        record_F[ADMISSION:] = -1
        record_F[ADMISSION : ADMISSION + len(stop_ids)] = stop_ids
        self._admissions += 1
        self.buffer_U[0] = self._admissions
        return True

    def keep_text(self, slot: int, group: int, tokens: NDArray[np.int32]) -> bool:
        """Put a text into a text slot, for the group to draft from."""
        if self._texts == self.layout.texts or self._payload + len(tokens) > self.layout.payload:
            return False
        if slot in self._named:
            return False
        self._named.add(slot)
        self._text_YF[self._texts] = slot, len(tokens), self._store(tokens), group
        self._texts += 1
        self.buffer_U[3] = self._texts
        return True

    def extend_pages(self, batch_slot: int, first: int, pages: Sequence[int]) -> bool:
        """Give a batch slot its pages `first`, `first + 1`, ..., which become its last ones: its
        capacity ends with them.
        """
        if (
            batch_slot in self._named
            or self._extensions == self.layout.extensions
            or self._payload + len(pages) > self.layout.payload
        ):
            return False
        self._named.add(batch_slot)
        capacity = (first + len(pages)) * PAGE_SIZE
        self._extension_XF[self._extensions] = (
            batch_slot,
            capacity,
            first,
            len(pages),
            self._store(np.asarray(pages, np.int32)),
        )
        self._extensions += 1
        self.buffer_U[1] = self._extensions
        return True

    def _store(self, values: NDArray[np.int32] | NDArray[np.int64]) -> int:
        """Append values, which fit int32, to the payload and return their offset."""
        at = self._payload
        self._payload += len(values)
        self.buffer_U[self.layout.payload_at + at : self.layout.payload_at + self._payload] = values
        return at


@triton.jit
def _put_text(token_QT, T, slot, token_I, tokens, BLOCK: tl.constexpr):
    """Copy a text to a slot; the programs share out its blocks."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    i_I = tl.arange(0, BLOCK)
    for done in range(program * BLOCK, tokens, programs * BLOCK):
        inside_I = done + i_I < tokens
        copied_I = tl.load(token_I + done + i_I, mask=inside_I, other=0)
        tl.store(token_QT + slot.to(tl.int64) * T + done + i_I, copied_I, mask=inside_I)


@triton.jit
def _apply(
    upload_U, admission_AF, extension_XF, text_YF, payload_U,
    token_QT, length_Q, limit_Q, capacity_Q, page_table_QP, seed_Q, temperature_Q,
    filters_QF, stop_QK, done_Q, drafters_Q, max_depth_Q, max_rows_Q, group_Q, first_Q, hint_QH,
    repetition_Q, presence_Q, frequency_Q, prompt_Q, masked_to_Q, biases_Q, masks_Q, allowed_Q,
    listed_QL, bias_QL, uncounted_Q, adapter_Q,
    T, P, page_hint_PH, ADMISSION: tl.constexpr, EXTENSION: tl.constexpr, TEXT: tl.constexpr,
    FILTERS: tl.constexpr, K: tl.constexpr, L: tl.constexpr, H: tl.constexpr, HP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply an upload. The programs share out admissions, extensions and blocks of tokens; the last
    one to finish marks the upload as applied.
    """
    pdl_launch()
    program, programs = tl.program_id(0), tl.num_programs(0)
    i_I = tl.arange(0, BLOCK)
    pdl_wait()
    admissions, extensions, texts = tl.load(upload_U), tl.load(upload_U + 1), tl.load(upload_U + 3)
    for a in range(program, admissions, programs):
        record = admission_AF + a * (ADMISSION + K)
        batch_slot = tl.load(record)
        tl.store(length_Q + batch_slot, tl.load(record + 1))
        tl.store(limit_Q + batch_slot, tl.load(record + 3))
        low, high = tl.load(record + 4).to(tl.int64), tl.load(record + 5).to(tl.int64)
        tl.store(seed_Q + batch_slot, (high << 32) | (low & 0xFFFFFFFF))
        tl.store(temperature_Q + batch_slot, tl.load(record + 6).to(tl.float32, bitcast=True))
        for f in tl.static_range(FILTERS):
            tl.store(
                filters_QF + batch_slot * FILTERS + f, tl.load(record + ADMISSION - FILTERS + f)
            )
        tl.store(drafters_Q + batch_slot, tl.load(record + 10))
        tl.store(max_depth_Q + batch_slot, tl.load(record + 11))
        tl.store(max_rows_Q + batch_slot, tl.load(record + 12))
        tl.store(group_Q + batch_slot, tl.load(record + 13))
        tl.store(first_Q + batch_slot, tl.load(record + 14))
        tl.store(done_Q + batch_slot, 0)
        repetition = tl.load(record + 16).to(tl.float32, bitcast=True)
        presence = tl.load(record + 17).to(tl.float32, bitcast=True)
        frequency = tl.load(record + 18).to(tl.float32, bitcast=True)
        penalised = (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)
        tl.store(repetition_Q + batch_slot, repetition)
        tl.store(presence_Q + batch_slot, presence)
        tl.store(frequency_Q + batch_slot, frequency)
        allowed = tl.load(record + 7)
        tl.store(uncounted_Q + batch_slot, (penalised | (allowed > 0)).to(tl.int32))
        tl.store(prompt_Q + batch_slot, tl.load(record + 19))
        tl.store(masked_to_Q + batch_slot, tl.load(record + 20))
        tl.store(biases_Q + batch_slot, tl.load(record + 21))
        tl.store(masks_Q + batch_slot, tl.load(record + 22))
        tl.store(allowed_Q + batch_slot, allowed)
        tl.store(adapter_Q + batch_slot, tl.load(record + 9))
        for k in tl.static_range(K):
            tl.store(stop_QK + batch_slot * K + k, tl.load(record + ADMISSION + k))
        page = tl.load(record + 15)
        if H > 0:
            h_H = tl.arange(0, HP)
            hint_H = tl.load(
                page_hint_PH + tl.maximum(page, 0).to(tl.int64) * H + h_H,
                mask=(h_H < H) & (page >= 0),
                other=0.0,
            )
            tl.store(hint_QH + batch_slot.to(tl.int64) * H + h_H, hint_H, mask=h_H < H)
    for x in range(program, extensions, programs):
        record = extension_XF + x * EXTENSION
        batch_slot, first, pages, at = (
            tl.load(record),
            tl.load(record + 2),
            tl.load(record + 3),
            tl.load(record + 4),
        )
        tl.store(capacity_Q + batch_slot, tl.load(record + 1))
        for done in range(0, pages, BLOCK):
            page_I = tl.load(payload_U + at + done + i_I, mask=done + i_I < pages, other=0)
            tl.store(
                page_table_QP + batch_slot * P + first + done + i_I, page_I, mask=done + i_I < pages
            )
    for a in range(0, admissions):
        record = admission_AF + a * (ADMISSION + K)
        batch_slot, tokens, at = tl.load(record), tl.load(record + 1), tl.load(record + 2)
        _put_text(token_QT, T, batch_slot, payload_U + at, tokens, BLOCK)
        biases, at = tl.load(record + 21), tl.load(record + 8)
        listed = biases + tl.load(record + 22) + tl.load(record + 7)
        for done in range(program * BLOCK, listed, programs * BLOCK):
            l_I = done + i_I
            id_I = tl.load(payload_U + at + l_I, mask=l_I < listed, other=0)
            bias_I = tl.load(payload_U + at + listed + l_I, mask=l_I < biases, other=0)
            to_I = batch_slot.to(tl.int64) * L + l_I
            tl.store(listed_QL + to_I, id_I, mask=l_I < listed)
            tl.store(bias_QL + to_I, bias_I.to(tl.float32, bitcast=True), mask=l_I < biases)
    for y in range(0, texts):
        record = text_YF + y * TEXT
        slot, tokens, at = tl.load(record), tl.load(record + 1), tl.load(record + 2)
        tl.store(length_Q + slot, tokens)
        tl.store(group_Q + slot, tl.load(record + 3))
        _put_text(token_QT, T, slot, payload_U + at, tokens, BLOCK)
    if admissions + extensions + texts > 0:
        tl.debug_barrier()  # every thread has read its part
        if tl.atomic_add(upload_U + 2, 1, sem="acq_rel") == programs - 1:
            tl.store(upload_U, 0)
            tl.store(upload_U + 1, 0)
            tl.store(upload_U + 2, 0)
            tl.store(upload_U + 3, 0)


def apply(
    upload_U: Tensor,
    layout: UploadLayout,
    batch_slots: BatchSlots,
    page_hint_PH: Tensor | None = None,
) -> None:
    """Write admissions, extensions and texts to the batch slots, and mark the buffer as applied. So
    a graph may begin with this launch whether or not there is anything new.

    page_hint_PH: stored features of filled pages (None: there is no drafter). An admission without
    a hint page gets zeros.
    """
    hidden = batch_slots.hint_QH.shape[1] if page_hint_PH is not None else 0
    _apply[(PROGRAMS,)](
        upload_U,
        upload_U[layout.admissions_at :],
        upload_U[layout.extensions_at :],
        upload_U[layout.texts_at :],
        upload_U[layout.payload_at :],
        *batch_slots[:-1],  # the counts are made from the text, see `edits.count_text`
        batch_slots.token_QT.shape[1],
        batch_slots.page_table_QP.shape[1],
        page_hint_PH if page_hint_PH is not None else batch_slots.hint_QH,
        ADMISSION=ADMISSION,
        EXTENSION=EXTENSION,
        TEXT=TEXT,
        FILTERS=batch_slots.filters_QF.shape[1],
        K=layout.stops,
        L=layout.listed,
        H=hidden,
        HP=triton.next_power_of_2(max(hidden, 1)),
        BLOCK=1024,
        num_warps=4,
        **PDL,
    )
