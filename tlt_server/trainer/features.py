"""Features of the target over recorded responses, from where there are some.

A drafter reads the target's features at every position that a response has committed. They are
recomputed here by the project's own model, which gives the bits that serving had on such a device.
A cache of captured features is another `FeatureSource`.

Legend: T tokens of several responses, one response after another, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from tlt_server.samples.samples import Responses
from tlt_server.trainer.prefill import Prefill


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
