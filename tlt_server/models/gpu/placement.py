"""The place of a model on a GPU: device, type, and the way its matmuls and sums are computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_server.models.gpu.matmuls import StrictMatmuls
from tlt_server.models.gpu.sums import OWN_SUMS, LayerSums
from tlt_server.settings.server import DrafterParallel


@dataclass(frozen=True)
class Placement:
    """The device and type of weights, and the way matmuls and their sums are computed."""

    device: torch.device
    dtype: torch.dtype
    matmuls: StrictMatmuls
    sums: LayerSums = OWN_SUMS  # where the target's layers are summed
    drafter_parallel: DrafterParallel = "auto"  # whether ranks share a drafter

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.device)
