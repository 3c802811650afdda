"""Recomputes the target's features: a `DocumentSource` over recorded token ids, and a
`FeatureSource` over recorded responses.

The project's own model reads each document once, several together. A row's bits do not depend on
its batch, so they equal those that a server captured during generation. Documents stay in memory up
to a bound; the others are computed each time they are read.

Legend: T tokens, of one document or of several responses, F feature width, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_server.errors import InvalidRequest
from tlt_server.samples.samples import Responses
from tlt_server.trainer.learning.pack import DocumentPart
from tlt_server.trainer.target.prefill import Prefill

KEPT_BYTES = 1 << 30
TOGETHER = 4096  # tokens of the documents that are computed at a time, unless one has more


class Document(NamedTuple):
    """Token ids of a prompt and its response, or of a conversation."""

    token_T: NDArray[np.int32]
    counted_T: NDArray[np.bool_]  # is the token one that the target generated?


class Recomputed:
    def __init__(
        self, target: Prefill, documents: Sequence[Document], *, kept_bytes: int = KEPT_BYTES
    ) -> None:
        """`InvalidRequest` for a document longer than the target's positions."""
        longest = max((len(document.token_T) for document in documents), default=0)
        most = target.model.max_position
        if longest > most:
            raise InvalidRequest(
                f"a document has {longest} tokens, the target's limit is {most}; shorten it"
            )
        self._target, self._documents, self._room = target, documents, kept_bytes
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
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
            computed = self._compute(self._together(document))
            found = computed[document]
            for each, states in computed.items():
                size = sum(x.numel() * x.element_size() for x in states)
                if size <= self._room:
                    self._kept[each] = states
                    self._room -= size
        return found

    def _together(self, document: int) -> list[int]:
        """Return the document, and the next missing ones that will be kept."""
        target, chosen = self._target, [document]
        width = target.feature_width + target.model.hidden_size
        most = min(TOGETHER, self._room // (width * target.embedding_VH.element_size()))
        tokens = len(self._documents[document].token_T)
        for each in range(document + 1, len(self._documents)):
            if each not in self._kept:
                tokens += len(self._documents[each].token_T)
                if tokens > most:
                    break
                chosen.append(each)
        return chosen

    def _compute(self, documents: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
        texts = [self._documents[each].token_T for each in documents]
        hidden_TH, features_TF = (x.cpu() for x in self._target.states(texts))
        lengths = [len(text) for text in texts]
        self.computed += sum(lengths)
        # Copies, so that each document's memory is its own.
        parts = zip(features_TF.split(lengths), hidden_TH.split(lengths), strict=True)
        return {
            each: (features_TF.clone(), hidden_TH.clone())
            for each, (features_TF, hidden_TH) in zip(documents, parts, strict=True)
        }


class RecomputedFeatures:
    """Features from a prefill of the recorded tokens, each time they are needed. `target`: loaded
    with the layers that the drafter reads.
    """

    def __init__(self, target: Prefill) -> None:
        self._target = target

    @property
    def width(self) -> int:
        return self._target.feature_width

    def features(self, responses: Responses, chosen: Sequence[int]) -> Tensor:
        return self._target.states([responses.tokens(n) for n in chosen]).features_RF.cpu().float()
