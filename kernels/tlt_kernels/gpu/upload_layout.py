"""The sizes of an upload (`upload.py`) and where its sections begin.

Layout (int32): header [4] | batch_slot_B | batch_slot_W | start_W | count_W | admissions |
extensions | texts | payload (tokens, page ids, and the lists of tokens whose logits are edited).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tlt_kernels.filters import FILTERS
from tlt_kernels.gpu.tensors import PrefillChunks

HEADER = 4  # admissions, extensions, programs that have applied their part, texts
# Batch slot, tokens, payload, limit, seed (2), temperature, allowed tokens, payload of the lists,
# slot of its adapter, drafters, longest draft path, rows, group, first token for siblings, hint
# page, three penalties, prompt, end of the mask, biases, masks; filters and stop ids follow.
ADMISSION = 23 + len(FILTERS)
EXTENSION = 5  # batch slot, capacity, first page, pages, payload
TEXT = 4  # slot, tokens, payload, group


def rounded(ints: int) -> int:
    """Round up to a multiple of 16 bytes, the alignment of sections."""
    return -(-ints // 4) * 4


@dataclass(frozen=True)
class UploadLayout:
    """The sizes of an upload."""

    batch: int  # decoding requests
    chunks: int
    admissions: int
    extensions: int
    stops: int  # stop ids per batch slot
    payload: int  # at least one longest prompt, its pages and the longest lists
    idle: int  # the idle batch slot
    listed: int = 1  # tokens of a batch slot with a bias or a mask
    texts: int = 0  # texts for others to draft from

    @property
    def chunks_at(self) -> int:
        return HEADER + rounded(self.batch)

    @property
    def admissions_at(self) -> int:
        return self.chunks_at + 3 * rounded(self.chunks)

    @property
    def extensions_at(self) -> int:
        return self.admissions_at + rounded(self.admissions * (ADMISSION + self.stops))

    @property
    def texts_at(self) -> int:
        return self.extensions_at + rounded(self.extensions * EXTENSION)

    @property
    def payload_at(self) -> int:
        return self.texts_at + self.texts * TEXT

    @property
    def size(self) -> int:
        """Return the ints of a buffer."""
        return self.payload_at + self.payload

    def batch_slot_B(self, upload_U: Tensor, requests: int) -> Tensor:
        """Return a view of the first `requests` batch slots of the batch in a device buffer."""
        return upload_U[HEADER : HEADER + requests]

    def chunks_W(self, upload_U: Tensor, chunks: int) -> PrefillChunks:
        """Return views of the first `chunks` prefill chunks in a device buffer."""
        first, each = self.chunks_at, rounded(self.chunks)
        return PrefillChunks._make(
            upload_U[first + i * each : first + i * each + chunks] for i in range(3)
        )
