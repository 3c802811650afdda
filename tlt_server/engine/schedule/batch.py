"""One step: the chunk of each sequence that it computes, and the runner's result for each. No
tensors.

The scheduler decides a batch; a runner computes it and may deliver the outcome a step late. While a
step that samples is in flight, the end of its sequence is unknown, so the sequence keeps two bounds
on its growth: at least `sure` and at most `ahead` tokens. `launch` and `land` bracket that, in the
order of the steps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from tlt_server.engine.schedule.sequence import Sequence
from tlt_server.wire.records import MAX_DRAFTS, NO_LIMITS, StepContext
from tlt_server.wire.tree_limits import MAX_DEPTH, MAX_ROWS


class Chunk:
    """Positions [start, end) of one sequence, which become rows of this step. The chunk samples if
    it reaches the end of the sequence.

    If a sampling step is still in flight, the chunk is the sequence's last position, wherever that
    ends up; start and end are then upper bounds.
    """

    __slots__ = ("decodes", "end", "epoch", "max_new", "samples", "sequence", "start")

    def __init__(self, sequence: Sequence, start: int, end: int) -> None:
        self.sequence, self.start, self.end, self.epoch = sequence, start, end, sequence.epoch
        self.samples = end == sequence.length + sequence.ahead
        self.decodes = self.samples and end - start == 1
        self.max_new = 0  # tokens it may append, once launched

    @property
    def void(self) -> bool:
        """Return True if the sequence has been preempted or has ended since, so the outcome is
        dropped.
        """
        return self.epoch != self.sequence.epoch

    def launch(self, depth: int) -> None:
        """Record that the chunk is in flight, with a draft tree of at most this depth."""
        sequence = self.sequence
        sequence.launched = min(self.end, sequence.length)
        if self.samples:
            self.max_new = 1 + depth if self.decodes else 1
            sequence.sure, sequence.ahead = sequence.sure + 1, sequence.ahead + self.max_new

    def land(self) -> None:
        """Record that the outcome is known; the caller applies it next."""
        if self.samples:
            self.sequence.sure -= 1
            self.sequence.ahead -= self.max_new


@dataclass(frozen=True)
class Batch:
    chunks: list[Chunk]
    weight_version: str = ""  # the version that computes it
    owners: tuple[str, ...] = ()  # owners of all that runs, in this step or not

    @cached_property
    def context(self) -> StepContext:
        decoding = [chunk for chunk in self.chunks if chunk.decodes]
        prompts = [chunk for chunk in self.chunks if not chunk.decodes]
        limits = [chunk.sequence.draft_limits for chunk in decoding]
        taken = [limit for limit in limits if limit is not None]
        own = [limit for limit in taken if limit is not NO_LIMITS]
        most = MAX_DRAFTS
        if own and all(limit.max_rows < MAX_ROWS for limit in taken):
            most = sum(limit.max_rows - 1 for limit in taken)
        return StepContext(
            decoding=len(decoding),
            prefill_rows=sum(chunk.end - chunk.start for chunk in prompts),
            mean_context=sum(chunk.end for chunk in decoding) / max(1, len(decoding)),
            speculable=len(taken),
            bound=dict(Counter(limit.drafter for limit in own if limit.drafter)),
            deepest=max((limit.max_depth for limit in taken), default=0) if own else MAX_DEPTH,
            most_drafts=most,
            chunks=len(prompts),
            filtered=any(chunk.sequence.is_filtered for chunk in self.chunks if chunk.samples),
            edited=any(chunk.sequence.is_edited for chunk in self.chunks if chunk.samples),
            structured=any(chunk.sequence.is_structured for chunk in self.chunks if chunk.samples),
            adapted=any(chunk.sequence.adapter is not None for chunk in self.chunks),
        )
