"""A prefill of whole texts on the CPU: what the target computes of recorded tokens.

In strict numerics a row's bits depend on its prefix only, so large chunks, which may hold rows of
several texts, give the bits that serving had.

Legend: T tokens of several texts, one text after another, R rows, N texts, P pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tlt_server.attention.rows import KVCache, Rows
from tlt_server.models import Forward
from tlt_server.models.decoder import Decoder

CHUNK = 512  # rows of one forward


class TextPages:
    """Pages of several texts that share none: those of a text lie one after another."""

    def __init__(self, lengths: Sequence[int], page_size: int) -> None:
        self.page_size = page_size
        self.length_N = np.array(lengths, np.int64)
        count_N = -(-self.length_N // page_size)
        self.first_N = np.cumsum(count_N) - count_N
        self.count = int(count_N.sum())
        # A page beyond a text's own is never read.
        columns = np.arange(int(count_N.max(initial=1)))
        self.table_NP = np.where(columns < count_N[:, None], self.first_N[:, None] + columns, 0)
        self.table_NP = self.table_NP.astype(np.int32)

    def kv_slots(self) -> NDArray[np.int64]:
        """Return the KV slot of every token, text after text."""
        starts_N = np.cumsum(self.length_N) - self.length_N
        place_T = np.arange(int(self.length_N.sum())) - np.repeat(starts_N, self.length_N)
        return np.repeat(self.first_N * self.page_size, self.length_N) + place_T


def prefill(
    target: Decoder, cache: KVCache, texts: Sequence[NDArray[np.int32]]
) -> Iterator[Forward]:
    """Yield the forwards over all tokens, in order. The cache has at least `TextPages.count` pages,
    and what they hold is overwritten.
    """
    pages = TextPages([len(text) for text in texts], target.page_size)
    assert pages.count <= cache.pages, "the cache was made for fewer tokens"
    for rows in _chunks(texts, pages):
        yield target.forward(rows, cache)


def _chunks(texts: Sequence[NDArray[np.int32]], pages: TextPages) -> Iterator[Rows]:
    """Yield the rows of each forward: the next `CHUNK` tokens, whichever texts they are of."""
    token_T = np.concatenate(texts).astype(np.int64)
    kv_slot_T = pages.kv_slots()
    text_T = np.repeat(np.arange(len(texts)), pages.length_N)
    starts_N = np.cumsum(pages.length_N) - pages.length_N
    position_T = np.arange(len(token_T)) - starts_N[text_T]
    for start in range(0, len(token_T), CHUNK):
        part = slice(start, start + CHUNK)
        first, last = int(text_T[part][0]), int(text_T[part][-1])
        base_B = np.minimum(
            pages.length_N[first : last + 1], start + CHUNK - starts_N[first : last + 1]
        )
        rows = len(token_T[part])
        yield Rows(
            token_R=torch.from_numpy(token_T[part]),
            position_R=torch.from_numpy(position_T[part]),
            kv_slot_R=torch.from_numpy(kv_slot_T[part]),
            request_R=torch.from_numpy((text_T[part] - first).astype(np.int32)),
            base_B=torch.from_numpy(base_B.astype(np.int32)),
            page_table_BP=torch.from_numpy(pages.table_NP[first : last + 1]),
            path_RD=torch.zeros(rows, 0, dtype=torch.int32),
        )
