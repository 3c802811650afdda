"""A prefill of whole texts on a GPU: `prefill` by the serving kernels.

Passes have at most `STEP_ROWS` rows and no CUDA graphs; a pass of that size hides the time to
launch its kernels.

Legend: T tokens of several concatenated texts, R rows, N texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tlt_kernels.gpu.tensors import PAGE_SIZE, RowTable
from tlt_server.attention.gpu import TritonPaged
from tlt_server.attention.rows import KVCache
from tlt_server.models import Forward
from tlt_server.models.config import ModelConfig
from tlt_server.models.gpu.decoder import GpuDecoder
from tlt_server.models.gpu.layers import RowTensors
from tlt_server.models.gpu.matmuls import StrictMatmuls
from tlt_server.models.gpu.placement import Placement
from tlt_server.models.loader import fill, gpu_dtype, own_dtype, unread
from tlt_server.models.split import Split, auto_gpu_leaves
from tlt_server.trainer.target.prefill import TextPages, Texts, joined

STEP_ROWS = 4096  # a server's default on a GPU


class GpuPrefill:
    def __init__(self, model: GpuDecoder) -> None:
        self.model = model
        self._cache: KVCache | None = None

    @classmethod
    def load(
        cls,
        directory: Path,
        config: ModelConfig,
        feature_layers: tuple[int, ...],
        device: torch.device | None = None,
    ) -> GpuPrefill:
        """Return a target with the dtype and reduction segments that a server chooses for this
        checkpoint.
        """
        device = device or torch.device("cuda", torch.cuda.current_device())
        dtype = getattr(torch, gpu_dtype(own_dtype(directory)))
        made = cls.empty(config, feature_layers, device, dtype)
        fill(made.model.parameters(), directory, ignored=unread(config))
        return made

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        feature_layers: tuple[int, ...],
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
    ) -> GpuPrefill:
        """Return a target without values."""
        placement = Placement(device, dtype, StrictMatmuls())
        split = Split(auto_gpu_leaves(config))
        return cls(
            GpuDecoder(config, placement=placement, feature_layers=feature_layers, split=split)
        )

    @property
    def feature_width(self) -> int:
        return self.model.feature_width

    @property
    def embedding_VH(self) -> Tensor:
        return self.model.embedding_VH

    @torch.inference_mode()
    def states(self, texts: Texts) -> Forward:
        config, placement = self.model.config, self.model.placement
        pages = TextPages(texts, PAGE_SIZE)
        cache = self._cache_of(pages.count)
        attention = TritonPaged(
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            context=int(pages.length_N.max()),
            device=placement.device,
            dtype=placement.dtype,
        )
        page_table_NP = torch.from_numpy(pages.table_NP).to(placement.device)
        found = []
        for rows in _passes(pages, placement.device):
            planned = attention.planned(len(rows.token_R), prompt_rows=len(rows.token_R))
            planned.plan(rows, page_table_NP)
            tensors = RowTensors(rows.token_R, rows.position_R, rows.kv_slot_R)
            found.append(self.model.forward(tensors, cache, planned))
        return joined(found)

    def head_rows(self, ids_C: Tensor) -> Tensor:
        return self.model.head_WH.index_select(0, ids_C.to(self.model.head_WH.device))

    def _cache_of(self, pages: int) -> KVCache:
        config = self.model.config
        if self._cache is None or self._cache.pages < pages:
            self._cache = None  # frees its memory first
            self._cache = self.model.placement.cache(config, pages, 1, config.layers)
        return self._cache


def _passes(pages: TextPages, device: torch.device) -> Iterator[RowTable]:
    """Yield the rows of each pass; text n is in batch slot n."""
    columns = {
        "token_R": pages.token_T,
        "position_R": pages.position_T,
        "kv_slot_R": pages.kv_slot_T,
        "batch_slot_R": pages.text_T,
        "base_R": pages.length_N[pages.text_T],
    }
    for start in range(0, len(pages.text_T), STEP_ROWS):
        part = slice(start, start + STEP_ROWS)
        rows = RowTable.allocate(len(pages.text_T[part]), 1, device=device.type)
        yield rows._replace(
            **{
                name: torch.from_numpy(values_T[part].astype(np.int32)).to(device)
                for name, values_T in columns.items()
            }
        )
