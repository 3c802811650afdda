"""Recorded sequences with the states that the engine computed: a `DocumentSource` to train on, and
a `FeatureSource` to replay drafters on.

Documents are a fixed choice of sequences under one target version. They hold their states, so
states that the store drops meanwhile stay readable until the documents are released.

Legend: T tokens, F feature width, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_server.samples.hidden_states import FLOAT32, Captured
from tlt_server.samples.sample import Sample
from tlt_server.samples.samples import Responses
from tlt_server.samples.segments import Recorded
from tlt_server.trainer.learning.pack import DocumentPart
from tlt_server.trainer.recording.state_store import StateStore


class RecordedDocuments:
    def __init__(
        self, documents: Sequence[tuple[Sample, Captured]], recomputed: Sequence[bool]
    ) -> None:
        """`documents`: sequences, with states of all tokens but the last. `recomputed`: which
        states were recomputed.
        """
        self._documents, self.recomputed = documents, recomputed

    @classmethod
    def of(cls, entries: Iterable[Recorded], states: StateStore, version: str) -> RecordedDocuments:
        """Return the sequences that have states of this target version, in this order. The others,
        see `StateStore.missing`, are left out.
        """
        found = ((entry.sample, states.find(version, entry.sample.tokens)) for entry in entries)
        kept = [(sample, captured) for sample, captured in found if captured is not None]
        return cls(kept, [states.recomputed(captured) for _, captured in kept])

    @property
    def lengths(self) -> Sequence[int]:
        return [captured.length + 1 for _, captured in self._documents]

    def read(self, document: int, start: int, stop: int) -> DocumentPart:
        """Return tokens [start, stop) of a sequence. States are float32, or bfloat16 if the engine
        computes in it; the last token has none, so its states are 0.
        """
        sample, captured = self._documents[document]
        return DocumentPart(
            torch.from_numpy(sample.token_T[start:stop].astype(np.int64)),
            _rows(captured, captured.features, captured.feature_width, start, stop),
            _rows(captured, captured.hidden, captured.hidden_width, start, stop),
            torch.arange(start, stop) >= sample.recorded_from,
        )


class CapturedFeatures:
    """Features of responses that all have states of one version. The last token's features are 0:
    nothing is drafted after it.
    """

    def __init__(self, states: StateStore, version: str, width: int) -> None:
        """`width`: F."""
        self._states, self._version, self.width = states, version, width

    def features(self, responses: Responses, chosen: Sequence[int]) -> Tensor:
        return torch.cat([self._of(responses.tokens(n)) for n in chosen])

    def _of(self, token_T: NDArray[np.int32]) -> Tensor:
        captured = self._states.find(self._version, token_T.astype("<i4").tobytes())
        assert captured is not None, "a response has no states"
        return _rows(captured, captured.features, self.width, 0, len(token_T)).float()


def _rows(captured: Captured, data: bytes, width: int, start: int, stop: int) -> Tensor:
    """Return rows [start, stop) of states, zeros after the end."""
    dtype = torch.float32 if captured.item == FLOAT32 else torch.bfloat16
    row = captured.item * width
    held = np.frombuffer(data, np.uint8)[start * row : stop * row]
    rows_TX = torch.zeros(stop - start, width, dtype=dtype)
    rows_TX.view(torch.uint8).numpy().reshape(-1)[: len(held)] = held
    return rows_TX
