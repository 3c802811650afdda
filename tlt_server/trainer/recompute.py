"""Features that the target computes again: a `DocumentSource` over recorded token ids.

The project's own model reads each document once, in chunks over a paged cache that holds one
document. A row's bits do not depend on what is batched with it, so these are the bits that a server
captured while it generated. Documents stay in memory up to a bound; the others are computed each
time they are read.

Legend: T tokens, F feature width, H hidden, C draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_server.attention.rows import KVCache
from tlt_server.errors import InvalidRequest
from tlt_server.models.decoder import Decoder
from tlt_server.trainer.pack import DocumentPart
from tlt_server.trainer.prefill import prefill

KEPT_BYTES = 1 << 30


class Document(NamedTuple):
    """Token ids of a prompt and its response, or of a conversation."""

    token_T: NDArray[np.int32]
    counted_T: NDArray[np.bool_]  # is the token one that the target generated?


class Recomputed:
    def __init__(
        self, target: Decoder, documents: Sequence[Document], *, kept_bytes: int = KEPT_BYTES
    ) -> None:
        """`InvalidRequest` for a document that is longer than the target's positions."""
        longest = max((len(document.token_T) for document in documents), default=0)
        if longest > target.max_position:
            raise InvalidRequest(
                f"a document has {longest} tokens, the target takes {target.max_position}"
            )
        self._target, self._documents, self._room = target, documents, kept_bytes
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._cache: KVCache | None = None
        self._pages = -(-longest // target.page_size)
        self.computed = 0  # tokens

    @property
    def lengths(self) -> Sequence[int]:
        return [len(document.token_T) for document in self._documents]

    def read(self, document: int, start: int, stop: int) -> DocumentPart:
        token_T, counted_T = self._documents[document]
        features_TF, hidden_TH = self._states(document)
        own = slice(start, stop)
        tokens_T = torch.from_numpy(token_T[own].astype(np.int64))
        return DocumentPart(
            tokens_T, features_TF[own], hidden_TH[own], torch.from_numpy(counted_T[own].copy())
        )

    def _states(self, document: int) -> tuple[Tensor, Tensor]:
        found = self._kept.get(document)
        if found is None:
            found = self._compute(self._documents[document].token_T)
            size = sum(x.numel() * x.element_size() for x in found)
            if size <= self._room:
                self._kept[document] = found
                self._room -= size
        return found

    @torch.inference_mode()
    def _compute(self, token_T: NDArray[np.int32]) -> tuple[Tensor, Tensor]:
        target = self._target
        if self._cache is None:
            self._cache = target.make_cache(self._pages, target.page_size, 0)
        found = list(prefill(target, self._cache, [token_T]))
        self.computed += len(token_T)
        return (
            torch.cat([forward.features_RF for forward in found]),
            torch.cat([forward.hidden_RH for forward in found]),
        )


def head_rows(target: Decoder, ids_C: Tensor) -> Tensor:
    """Return the LM head's rows of some tokens, [C, H]."""
    return target.head_HV.index_select(1, ids_C).t().contiguous()
