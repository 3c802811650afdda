"""States that the engine captured: a cache for the weight versions in force, bounded in bytes.

Features belong to the weights that made them. The first sequence that another version computed
drops those of versions before it, except the newest `staleness`; a version that comes back counts
as new. Above the bound the oldest sequences go.

Legend: T tokens of several responses, one response after another, F features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tlt_server.samples.captured import Captured, key_of
from tlt_server.samples.samples import Responses
from tlt_server.trainer.features import FeatureSource


class StateStore:
    def __init__(self, bound: int, staleness: int = 0) -> None:
        """`bound`: bytes of states. `staleness`: versions kept before the newest one."""
        self._bound, self._staleness = bound, staleness
        self._versions: list[str] = []  # the newest one last
        self._kept: dict[tuple[str, bytes], Captured] = {}  # the oldest first
        self.tokens = self.size = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, captured: Captured) -> None:
        """Keep a sequence's states, unless they alone are above the bound."""
        self._in_force(captured.version)
        if _bytes(captured) > self._bound:
            return
        place = captured.version, captured.key
        if place in self._kept:
            self._drop(place)
        self._kept[place] = captured
        self.tokens += captured.length
        self.size += _bytes(captured)
        while self.size > self._bound:
            self._drop(next(iter(self._kept)))

    def find(self, version: str, tokens: bytes) -> Captured | None:
        """Return the states over these int32 tokens, prompt and output; None if not kept."""
        return self._kept.get((version, key_of(tokens)))

    def _in_force(self, version: str) -> None:
        if self._versions and self._versions[-1] == version:
            return
        self._versions = [*(v for v in self._versions if v != version), version]
        self._versions = self._versions[-1 - self._staleness :]
        for place in [p for p in self._kept if p[0] not in self._versions]:
            self._drop(place)

    def _drop(self, place: tuple[str, bytes]) -> None:
        captured = self._kept.pop(place)
        self.tokens -= captured.length
        self.size -= _bytes(captured)


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


def _bytes(captured: Captured) -> int:
    return len(captured.features) + len(captured.hidden)
