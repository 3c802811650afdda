"""A launched step of the GPU runner whose outcome has not been read."""

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
    """Pair the chunks with their entries in the pass; prompt entries follow a decode bucket of
    `size`.
    """
    return [*enumerate(decoding), *((size + w, work) for w, work in enumerate(prompts))]


class AwaitedOutcome(Protocol):
    """The outcome of a step, in host memory after `wait`."""

    @property
    def array(self) -> NDArray[np.int32]: ...

    def wait(self) -> None:
        """Wait until the outcome has arrived; a second call returns at once."""


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
        """Wait for the outcome and return views of it. `depth`: of the longest draft path."""
        self.outcome.wait()
        entries, width = self.key.batch + self.key.chunks, fields(depth)
        return parse(self.outcome.array[: entries * width].reshape(entries, width))


def newest_tokens(flights: Iterable[Flight], depth: int) -> dict[EngineSequence, list[int]]:
    """Wait for the steps in flight and return the tokens that they give structured outputs."""
    found: dict[EngineSequence, list[int]] = {}
    for flight in flights:
        outcome = flight.outcomes(depth)
        for e, work in flight.entries:
            if work.samples and work.sequence.is_structured and not work.void:
                tokens = outcome.token_EA[e, : int(outcome.count_E[e])].tolist()
                found.setdefault(work.sequence, []).extend(tokens)
    return found
