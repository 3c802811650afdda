"""The placement of a model on a GPU: device, dtype, and the computation of its matmuls and sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_client.quantise import scales_shape
from tlt_kernels.gpu.quantise import E4M3, Matrix, Quantised, empty_rows
from tlt_kernels.gpu.tensors import PAGE_SIZE
from tlt_server.attention.rows import KVCache
from tlt_server.models.config import ModelConfig
from tlt_server.models.gpu.matmuls import StrictMatmuls
from tlt_server.models.gpu.sums import OWN_SUMS, LayerSums
from tlt_server.settings.server import DrafterParallel


@dataclass(frozen=True)
class Placement:
    """The device and dtype of weights, and the computation of matmuls and their sums."""

    device: torch.device
    dtype: torch.dtype
    matmuls: StrictMatmuls
    sums: LayerSums = OWN_SUMS  # where the target's layers are summed
    drafter_parallel: DrafterParallel = "auto"  # whether ranks share a drafter

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.device)

    def rows(self, count: int, inputs: int, *, quantised: bool) -> Tensor | Quantised:
        """Allocate the input of a matmul, in FP8 if `quantised`."""
        if quantised:
            return empty_rows(count, inputs, self.device)
        return self.empty(count, inputs)

    def matrix(self, outputs: int, inputs: int, *, quantised: bool = False) -> Matrix:
        """Allocate a weight, in FP8 if `quantised`."""
        if not quantised:
            return Matrix(self.empty(outputs, inputs))
        values = torch.empty(outputs, inputs, dtype=E4M3, device=self.device)
        scales = scales_shape(values.shape)
        return Matrix(values, torch.empty(*scales, dtype=torch.float32, device=self.device))

    def cache(
        self, config: ModelConfig, pages: int, scratch: int, layers: int, *, quantised: bool = False
    ) -> KVCache:
        """Allocate KV for layers of this shape, of the weights' dtype or in e4m3."""
        return KVCache(
            layers=layers,
            pages=pages,
            page_size=PAGE_SIZE,
            scratch=scratch,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=self.dtype,
            device=str(self.device),
            quantised=quantised,
        )
