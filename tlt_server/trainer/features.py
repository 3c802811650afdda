"""Features of the target over recorded responses: captured by the engine, or recomputed.

A drafter reads the target's features at every position that a response has committed. The
project's own model recomputes them with the bits that serving had on such a device.

Legend: T tokens of several responses, one response after another, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tlt_server.samples.samples import Responses
from tlt_server.trainer.prefill import Prefill
from tlt_server.trainer.state_store import StateStore


class FeatureSource(Protocol):
    @property
    def width(self) -> int:
        """Return F."""

    def features(self, responses: Responses, chosen: Sequence[int]) -> Tensor:
        """Return the features of all tokens of these responses, float32 [T, F] on the CPU."""


class RecomputedFeatures:
    """Features by a prefill of the recorded tokens. The target is loaded with the layers that the
    drafter reads.
    """

    def __init__(self, target: Prefill) -> None:
        self._target = target

    @property
    def width(self) -> int:
        return self._target.feature_width

    def features(self, responses: Responses, chosen: Sequence[int]) -> Tensor:
        return self._target.states([responses.tokens(n) for n in chosen]).features_RF.cpu().float()


class CapturedFeatures:
    """Captured features of one version's responses; those of others come from `rest`.

    The last token of a captured response has a row of zeros: nothing is drafted after it.
    """

    def __init__(self, store: StateStore, version: str, rest: FeatureSource) -> None:
        self._store, self._version, self._rest = store, version, rest

    @property
    def width(self) -> int:
        return self._rest.width

    def features(self, responses: Responses, chosen: Sequence[int]) -> Tensor:
        found = [self._find(responses, n) for n in chosen]
        holes = [n for n, part in zip(chosen, found, strict=True) if part is None]
        if not holes:
            filled: list[Tensor] = []
        else:
            lengths = [len(responses.tokens(n)) for n in holes]
            filled = [*self._rest.features(responses, holes).split(lengths)]
        parts = iter(filled)
        return torch.cat([next(parts) if part is None else part for part in found])

    def _find(self, responses: Responses, n: int) -> Tensor | None:
        tokens = responses.tokens(n)
        captured = self._store.find(self._version, tokens.astype("<i4").tobytes())
        if captured is None:
            return None
        features_TF = torch.zeros(len(tokens), self.width)
        features_TF[: captured.length] = torch.from_numpy(captured.features_TF.copy())
        return features_TF
