"""The device's state while the engine runs: weights, KV, batch slots, and the KV slots after the
pages.

The KV slots of both caches have the same numbers: [pages | verified draft rows | trash | the
drafter's tree rows], the last only in the drafter's cache. A row that does not count writes to the
trash slot. Made by `start/maker.py`, read by all captured passes.

Legend: P pages, H hidden, U upload, R rows of a step at most, S sampled rows of a step at most, V
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from tlt_kernels.gpu.structure import Masks
from tlt_kernels.gpu.tensors import BatchSlots
from tlt_kernels.gpu.upload_layout import UploadLayout
from tlt_server.attention.rows import KVCache
from tlt_server.engine.gpu.steps.agreement import Agreement
from tlt_server.engine.gpu.steps.head import SharedHead
from tlt_server.models.gpu.adapted import GpuAdapterSlots
from tlt_server.models.gpu.decoder import GpuDecoder

SCORED = 256  # prompt tokens that are scored at once


@dataclass(frozen=True)
class KVSlots:
    """Scratch KV slots after the pages."""

    start: int  # the first slot of verified draft rows
    verified: int
    tree: int  # rows of a drafter

    @property
    def trash(self) -> int:
        return self.start + self.verified

    @property
    def tree_start(self) -> int:
        return self.trash + 1


@dataclass
class DeviceState:
    """The tensors that passes read and write. Only `model` ever changes: to the object that has the
    resident storage, see `models.gpu.swapping`.
    """

    model: GpuDecoder
    cache: KVCache
    kv_slots: KVSlots
    batch_slots: BatchSlots
    layout: UploadLayout
    upload_U: Tensor
    hidden_RH: Tensor  # final hidden states of the step that runs, with SCORED rows to spare
    # Its fp32 logits, edited. Reports are read from both after the step.
    logits_SV: Tensor
    depth: int  # longest draft path
    # The hint after each page's last position; None without a drafter with a network.
    page_hint_PH: Tensor | None
    adapters: GpuAdapterSlots | None = None  # None: the server takes no adapters
    agreement: Agreement | None = None  # None: there is one rank
    head: SharedHead | None = None  # None: this rank has all of it

    def logits(self, hidden_SH: Tensor, logits_SV: Tensor) -> Tensor:
        """Compute all logits of these hidden states into `logits_SV`, on all ranks."""
        if self.head is None:
            return self.model.logits(hidden_SH, logits_SV)
        return self.head.logits(self.model, hidden_SH, logits_SV)

    @cached_property
    def masks(self) -> Masks:
        """Return the memory for masks of structured outputs, allocated at first use."""
        samples, vocabulary = self.logits_SV.shape
        return Masks.allocate(samples, vocabulary, device=str(self.logits_SV.device))

    def batch_slot_B(self, batch: int) -> Tensor:
        return self.layout.batch_slot_B(self.upload_U, batch)
