"""Features of the target over recorded responses, from where there are some.

A drafter reads the target's features at every position that a response has committed. They are
recomputed here by the project's own model on the CPU, which gives the bits that serving had. A
cache of captured features is another `FeatureSource`.

Legend: T tokens of several responses, one response after another, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tlt_server.models.decoder import Decoder
from tlt_server.samples.samples import Responses
from tlt_server.trainer.prefill import TextPages, prefill


class FeatureSource(Protocol):
    @property
    def width(self) -> int:
        """Return F."""

    def features(self, responses: Responses, chosen: Sequence[int]) -> Tensor:
        """Return the features of all tokens of these responses, [T, F]."""


class RecomputedFeatures:
    """Features by a prefill of the recorded tokens. The target is loaded with the layers that the
    drafter reads.
    """

    def __init__(self, target: Decoder) -> None:
        self._target = target
        self._cache = target.make_cache(1, target.page_size, 0)

    @property
    def width(self) -> int:
        return self._target.feature_width

    @torch.inference_mode()
    def features(self, responses: Responses, chosen: Sequence[int]) -> Tensor:
        texts = [responses.tokens(n) for n in chosen]
        pages = TextPages([len(text) for text in texts], self._target.page_size)
        if self._cache.pages < pages.count:
            self._cache = self._target.make_cache(pages.count, self._target.page_size, 0)
        found = prefill(self._target, self._cache, texts)
        return torch.cat([forward.features_RF for forward in found])
