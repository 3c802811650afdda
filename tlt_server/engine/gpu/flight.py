"""A step of the GPU runner whose outcome is on its way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tlt_kernels.gpu.accept import EntryOutcomes, fields, parse
from tlt_server.engine.gpu.memory.hidden_states import CapturedStep
from tlt_server.engine.gpu.steps.extend import ExtendKey
from tlt_server.engine.gpu.steps.reports import Reports
from tlt_server.engine.gpu.steps.tree_samples import TreeSample
from tlt_server.engine.schedule.batch import Batch, Chunk
from tlt_server.engine.schedule.sequence import Sequence as EngineSequence
from tlt_server.wire.records import Strategy


def entries_of(
    decoding: Sequence[Chunk], prompts: Sequence[Chunk], size: int
) -> list[tuple[int, Chunk]]:
    """Return the chunks with their entries; those of prompts come after a bucket of `size`."""
    return [*enumerate(decoding), *((size + w, work) for w, work in enumerate(prompts))]


class AwaitedOutcome(Protocol):
    """Everything that a step gives, in the host's memory once it is waited for."""

    @property
    def array(self) -> NDArray[np.int32]: ...

    def wait(self) -> None:
        """Wait until it is there; no more once it was."""


class Flight(NamedTuple):
    batch: Batch
    strategy: Strategy
    key: ExtendKey
    decoding: list[Chunk]
    prompts: list[Chunk]
    outcome: AwaitedOutcome
    reports: Reports | None
    trees: TreeSample | None
    captured: CapturedStep | None

    @property
    def entries(self) -> list[tuple[int, Chunk]]:
        return entries_of(self.decoding, self.prompts, self.key.batch)

    def outcomes(self, depth: int) -> EntryOutcomes:
        """Wait for the outcome, and return views of it. `depth`: of the longest draft path."""
        self.outcome.wait()
        entries, width = self.key.batch + self.key.chunks, fields(depth)
        return parse(self.outcome.array[: entries * width].reshape(entries, width))


def newest_tokens(flights: Iterable[Flight], depth: int) -> dict[EngineSequence, list[int]]:
    """Wait for steps in flight, and return the tokens that they give structured outputs."""
    found: dict[EngineSequence, list[int]] = {}
    for flight in flights:
        outcome = flight.outcomes(depth)
        for e, work in flight.entries:
            if work.samples and work.sequence.is_structured and not work.void:
                tokens = outcome.token_EA[e, : int(outcome.count_E[e])].tolist()
                found.setdefault(work.sequence, []).extend(tokens)
    return found
