"""Targets with random weights that compute the states of texts, to time what a trainer waits for
when no states were captured.

Strict numerics and paged KV, as a server's prefill. On a GPU the passes have at most `STEP_ROWS`
rows and are no CUDA graphs; a pass of that size hides what launching its kernels takes.

Legend: T tokens of several texts, one text after another, R rows, N texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_kernels.gpu.tensors import PAGE_SIZE, RowTable
from tlt_server.attention.gpu import TritonPaged
from tlt_server.attention.rows import KVCache
from tlt_server.models import FAMILIES, Forward
from tlt_server.models.config import ModelConfig
from tlt_server.models.gpu.decoder import GpuDecoder
from tlt_server.models.gpu.layers import Placement, RowTensors
from tlt_server.models.gpu.matmuls import StrictMatmuls
from tlt_server.models.numerics import Numerics
from tlt_server.trainer.prefill import TextPages, prefill

STEP_ROWS = 4096  # a server's default on a GPU

Texts = Sequence[NDArray[np.int32]]


class RandomTarget(Protocol):
    def states(self, texts: Texts) -> Forward:
        """Return hidden states and features of all tokens, text after text."""


class CpuTarget:
    def __init__(self, config: ModelConfig, feature_layers: tuple[int, ...]) -> None:
        family = FAMILIES.resolve(config.architecture)
        self.model = family(config, numerics=Numerics("strict"), feature_layers=feature_layers)
        randomise(self.model.own_parameters())

    @torch.inference_mode()
    def states(self, texts: Texts) -> Forward:
        pages = TextPages([len(text) for text in texts], PAGE_SIZE)
        cache = self.model.make_cache(pages.count, PAGE_SIZE, 0)
        return joined(prefill(self.model, cache, texts))


class GpuTarget:
    def __init__(
        self,
        config: ModelConfig,
        feature_layers: tuple[int, ...],
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        placement = Placement(device, dtype, StrictMatmuls())
        self.model = GpuDecoder(config, placement=placement, feature_layers=feature_layers)
        randomise(self.model.own_parameters())
        self._cache: KVCache | None = None

    @torch.inference_mode()
    def states(self, texts: Texts) -> Forward:
        config, placement = self.model.config, self.model.placement
        pages = TextPages([len(text) for text in texts], PAGE_SIZE)
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
        for rows in _passes(texts, pages, placement.device):
            planned = attention.planned(len(rows.token_R), prompt_rows=len(rows.token_R))
            planned.plan(rows, page_table_NP)
            tensors = RowTensors(rows.token_R, rows.position_R, rows.kv_slot_R)
            found.append(self.model.forward(tensors, cache, planned))
        return joined(found)

    def _cache_of(self, pages: int) -> KVCache:
        config, placement = self.model.config, self.model.placement
        if self._cache is None or self._cache.pages < pages:
            self._cache = KVCache(
                layers=config.layers,
                pages=pages,
                page_size=PAGE_SIZE,
                scratch=1,
                kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                dtype=placement.dtype,
                device=str(placement.device),
            )
        return self._cache


def random_target(
    config: ModelConfig, feature_layers: tuple[int, ...], device: torch.device
) -> RandomTarget:
    if device.type == "cuda":
        return GpuTarget(config, feature_layers, device)
    return CpuTarget(config, feature_layers)


def randomise(weights: Mapping[str, Tensor]) -> None:
    """Fill matrices with values that keep the scale of states; norms are 1, biases 0."""
    for name, weight in weights.items():
        if weight.dim() == 1:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            weight.normal_(0.0, weight.shape[1] ** -0.5)


def joined(passes: Iterable[Forward]) -> Forward:
    parts = list(passes)
    return Forward(
        torch.cat([part.hidden_RH for part in parts]),
        torch.cat([part.features_RF for part in parts]),
    )


def _passes(texts: Texts, pages: TextPages, device: torch.device) -> Iterable[RowTable]:
    """Yield the rows of each pass; texts are in batch slots of their numbers."""
    text_T = np.repeat(np.arange(len(texts)), pages.length_N)
    starts_N = np.cumsum(pages.length_N) - pages.length_N
    columns = {
        "token_R": np.concatenate(texts),
        "position_R": np.arange(len(text_T)) - starts_N[text_T],
        "kv_slot_R": pages.kv_slots(),
        "batch_slot_R": text_T,
        "base_R": pages.length_N[text_T],
    }
    for start in range(0, len(text_T), STEP_ROWS):
        part = slice(start, start + STEP_ROWS)
        rows = RowTable.allocate(len(text_T[part]), 1, device=device.type)
        yield rows._replace(
            **{
                name: torch.from_numpy(values_T[part].astype(np.int32)).to(device)
                for name, values_T in columns.items()
            }
        )
