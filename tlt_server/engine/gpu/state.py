"""What lives on the device while the engine runs: weights, KV, places, and the slots behind the
pages.

Slots of both KV caches are numbered alike: [pages | verified draft rows | trash | the drafter's own
tree rows], the last of which only the drafter's cache has. A row that does not count writes to the
trash slot. Made by `devices/cuda.py`, read by everything that is captured.

Legend: P pages, H hidden, U upload, S sampled rows of a step at most, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tlt_kernels.gpu.places import UploadLayout
from tlt_kernels.gpu.tensors import Places
from tlt_server.attention.rows import KVCache
from tlt_server.models.gpu.decoder import GpuDecoder


@dataclass(frozen=True)
class Slots:
    """Scratch behind the pages."""

    start: int  # of verified draft rows
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
    """Only `model` ever changes: to the object that holds the resident storage, see
    `models.gpu.exchange`.
    """

    model: GpuDecoder
    cache: KVCache
    slots: Slots
    places: Places
    layout: UploadLayout
    upload_U: Tensor
    logits_SV: Tensor  # fp32, of the step that runs: what is said beside its tokens is read from them behind it
    depth: int  # longest draft path

    def place_B(self, batch: int) -> Tensor:
        return self.layout.place_B(self.upload_U, batch)
