"""Captured strategies, and the time that the others would have saved.

A policy asks before each step. The time that a strategy without graphs would have saved adds up,
per graph; once it exceeds the time of a capture, a step captures them, so waiting and capturing
together lose at most twice that time. Idle time first captures the graphs that would have saved
most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from tlt_server.engine.gpu.memory.graphs import GraphPool
from tlt_server.engine.gpu.steps.buckets import Shapes, StepShape
from tlt_server.engine.gpu.steps.drafts import DraftKey
from tlt_server.engine.gpu.steps.extend import ExtendKey, unrecorded
from tlt_server.wire.records import OFF, StepContext, Strategy

MAX_KEPT = 4096  # answers, and sums
Key = DraftKey | ExtendKey


class GraphRecordings:
    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._graphs = GraphPool(None)  # captures nothing; that of the runner follows
        self._answers: dict[tuple[object, ...], NDArray[np.int64]] = {}
        self._changes = -1  # number of changes of the graphs when the answers were found
        self._saved_s: dict[Key, float] = {}

    def follow(self, graphs: GraphPool) -> None:
        self._graphs = graphs

    def missing(
        self,
        context: StepContext,
        drafter: str,
        depths: Sequence[int],
        widths: Sequence[int],
        decode_rows: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        graphs = self._graphs
        if not graphs.captures:
            return np.zeros((1, 1, 1), np.int64)
        if self._changes != graphs.changes or len(self._answers) > MAX_KEPT:
            self._answers, self._changes = {}, graphs.changes
        prompts = context.prefill_rows, context.chunks
        batch = self._shapes.batch(context.decoding, prompts=context.chunks > 0)
        drafts = drafter, batch, context.chunks > 0
        variant = context.filtered, context.edited, context.structured, context.adapted
        extends = bool(drafter), batch, prompts, variant
        if drafts not in self._answers:
            self._answers[drafts] = np.array(
                [
                    [self._lacking(self._step(context, drafter, d, w, int(decode_rows[-1])).draft)]
                    for d in depths
                    for w in widths
                ],
                np.int64,
            ).reshape(len(depths), len(widths), 1)
        if extends not in self._answers:
            self._answers[extends] = np.array(
                [self._lacking(self._step(context, drafter, 1, 1, r).extend) for r in decode_rows],
                np.int64,
            )
        return self._answers[drafts] + self._answers[extends]

    def want(self, context: StepContext, strategy: Strategy, saved_s: float) -> bool:
        graphs = self._graphs
        shape = self._shapes.shape(context, strategy)
        lacking = [key for key in (shape.draft, shape.extend) if key and self._lacking(key)]
        if len(self._saved_s) > MAX_KEPT:
            self._saved_s.clear()
        for key in lacking:
            self._saved_s[key] = self._saved_s.get(key, 0.0) + saved_s
        least_s = min((self._saved_s[key] for key in lacking), default=0.0)
        return graphs.records and least_s >= graphs.record_s * sum(map(self._lacking, lacking))

    def wanted(self) -> Iterator[Key]:
        """Yield the keys that would have saved time, the largest saving first."""
        for key in sorted(self._saved_s, key=lambda key: -self._saved_s[key]):
            if self._lacking(key):
                yield key

    def _lacking(self, key: Key | None) -> int:
        """Return the number of graphs that the key needs and lacks."""
        if key is None or (isinstance(key, ExtendKey) and not self._shapes.keeps(key)):
            return 0
        return unrecorded(key, self._graphs)

    def _step(
        self, context: StepContext, drafter: str, depth: int, width: int, rows: int
    ) -> StepShape:
        batch = self._shapes.batch(context.decoding, prompts=context.chunks > 0)
        budget = max(1, int(rows) - batch)
        strategy = Strategy(drafter, depth, width, 2, budget) if drafter else OFF
        return self._shapes.shape(context, strategy)
