"""A prefill of whole texts: the target's states of recorded tokens, on any device.

In strict numerics a row's bits depend only on its prefix, so large chunks, even with rows of
several texts, give the bits of serving on such a device.

Legend: T tokens of several concatenated texts, R rows, N texts, P pages, F feature width, C draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_server.attention.rows import KVCache, Rows
from tlt_server.models import Forward
from tlt_server.models.config import ModelConfig
from tlt_server.models.decoder import Decoder
from tlt_server.models.draft_checkpoint import Served
from tlt_server.models.loader import load_target
from tlt_server.models.numerics import Numerics
from tlt_server.registry import load_object

CHUNK = 512  # rows of one forward on a CPU

Texts = Sequence[NDArray[np.int32]]


class Prefill(Protocol):
    """A target that computes the states of texts. `model`: its drafters are made for it."""

    @property
    def model(self) -> Served: ...

    @property
    def feature_width(self) -> int:
        """Return F."""

    @property
    def embedding_VH(self) -> Tensor: ...

    def states(self, texts: Texts) -> Forward:
        """Return hidden states and features of all tokens, text after text."""

    def head_rows(self, ids_C: Tensor) -> Tensor:
        """Return the LM head's rows of some tokens, [C, H]."""


class CpuPrefill:
    def __init__(self, model: Decoder) -> None:
        self.model = model
        self._cache: KVCache | None = None

    @classmethod
    def load(
        cls, directory: Path, config: ModelConfig, feature_layers: tuple[int, ...]
    ) -> CpuPrefill:
        numerics = Numerics("strict", threads=torch.get_num_threads())
        return cls(
            load_target(directory, numerics=numerics, config=config, feature_layers=feature_layers)
        )

    @property
    def feature_width(self) -> int:
        return self.model.feature_width

    @property
    def embedding_VH(self) -> Tensor:
        return self.model.embedding_VH

    @torch.inference_mode()
    def states(self, texts: Texts) -> Forward:
        pages = TextPages(texts, self.model.page_size)
        if self._cache is None or self._cache.pages < pages.count:
            self._cache = None  # frees its memory first
            self._cache = self.model.make_cache(pages.count, self.model.page_size, 0)
        return joined(self.model.forward(rows, self._cache) for rows in _chunks(pages))

    def head_rows(self, ids_C: Tensor) -> Tensor:
        return self.model.head_HV.index_select(1, ids_C).t().contiguous()


PREFILLS = {
    "cpu": "tlt_server.trainer.target.prefill:CpuPrefill",
    "cuda": "tlt_server.trainer.target.gpu_prefill:GpuPrefill",
}


def load_prefill(
    directory: Path, device: str, feature_layers: tuple[int, ...], config: ModelConfig | None = None
) -> Prefill:
    """Return the target in `directory` on a device. `config`: its config with a lower
    `max_position`, if enough. Raises `ModelError` or `StartupError`.
    """
    config = config or ModelConfig.read(directory)
    made: Prefill = load_object(PREFILLS[device]).load(directory, config, feature_layers)
    return made


def joined(forwards: Iterable[Forward]) -> Forward:
    parts = list(forwards)
    return Forward(
        torch.cat([part.hidden_RH for part in parts]),
        torch.cat([part.features_RF for part in parts]),
    )


class TextPages:
    """The tokens of several concatenated texts, with separate, consecutive pages for each text."""

    def __init__(self, texts: Texts, page_size: int) -> None:
        self.token_T = np.concatenate(texts).astype(np.int32)
        self.length_N = np.array([len(text) for text in texts], np.int64)
        self.start_N = np.cumsum(self.length_N) - self.length_N
        self.text_T = np.repeat(np.arange(len(texts)), self.length_N)
        self.position_T = np.arange(len(self.token_T)) - self.start_N[self.text_T]
        count_N = -(-self.length_N // page_size)
        first_N = np.cumsum(count_N) - count_N
        self.count = int(count_N.sum())
        # A page beyond a text's own is never read.
        columns = np.arange(int(count_N.max(initial=1)))
        table_NP = np.where(columns < count_N[:, None], first_N[:, None] + columns, 0)
        self.table_NP = table_NP.astype(np.int32)
        self.kv_slot_T = first_N[self.text_T] * page_size + self.position_T


def _chunks(pages: TextPages) -> Iterator[Rows]:
    """Yield the rows of each forward: the next `CHUNK` tokens, across texts."""
    for start in range(0, len(pages.token_T), CHUNK):
        part = slice(start, start + CHUNK)
        text_R = pages.text_T[part]
        own = slice(int(text_R[0]), int(text_R[-1]) + 1)
        base_B = np.minimum(pages.length_N[own], start + CHUNK - pages.start_N[own])
        yield Rows(
            token_R=torch.from_numpy(pages.token_T[part].astype(np.int64)),
            position_R=torch.from_numpy(pages.position_T[part]),
            kv_slot_R=torch.from_numpy(pages.kv_slot_T[part]),
            request_R=torch.from_numpy((text_R - own.start).astype(np.int32)),
            base_B=torch.from_numpy(base_B.astype(np.int32)),
            page_table_BP=torch.from_numpy(pages.table_NP[own]),
            path_RD=torch.zeros(len(text_R), 0, dtype=torch.int32),
        )
