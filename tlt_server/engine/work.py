"""One step's work on each sequence: decided by the scheduler, computed by a runner, which may tell
the outcome a step late.

While a step that samples is in flight, its sequence's end is not known: the sequence counts by how
much it will grow at least (`sure`) and at most (`ahead`). `launch` and `land` bracket that, in the
order of the steps. No tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from tlt_server.engine.sequence import Sequence
from tlt_server.errors import TltError
from tlt_server.records import StepContext, TokenLogprobs


class Work:
    """Positions [start, end) of one sequence are this step's certain rows; it samples if they reach
    its end.

    Behind a step in flight that samples, the work is the sequence's last position, wherever that
    will be; start and end are upper bounds.
    """

    __slots__ = ("decodes", "end", "life", "most", "samples", "sequence", "start")

    def __init__(self, sequence: Sequence, start: int, end: int) -> None:
        self.sequence, self.start, self.end, self.life = sequence, start, end, sequence.life
        self.samples = end == sequence.length + sequence.ahead
        self.decodes = self.samples and end - start == 1
        self.most = 0  # tokens it may append, once launched

    @property
    def void(self) -> bool:
        """The sequence was preempted or has ended since: what this step says of it is dropped."""
        return self.life != self.sequence.life

    def launch(self, depth: int) -> None:
        """It is on its way, with a draft tree of at most this depth."""
        sequence = self.sequence
        sequence.launched = min(self.end, sequence.length)
        if self.samples:
            self.most = 1 + depth if self.decodes else 1
            sequence.sure, sequence.ahead = sequence.sure + 1, sequence.ahead + self.most

    def land(self) -> None:
        """Its outcome is known, and is taken over next."""
        if self.samples:
            self.sequence.sure, self.sequence.ahead = (
                self.sequence.sure - 1,
                self.sequence.ahead - self.most,
            )


@dataclass(frozen=True)
class Batch:
    works: list[Work]
    weight_version: str = ""  # that computes it

    @cached_property
    def context(self) -> StepContext:
        decoding = [work for work in self.works if work.decodes]
        return StepContext(
            decoding=len(decoding),
            prefill_rows=sum(work.end - work.start for work in self.works if not work.decodes),
            mean_context=sum(work.end for work in decoding) / max(1, len(decoding)),
            speculable=sum(work.sequence.request.sd for work in decoding),
        )


@dataclass
class Emission:
    """What one work gave in a step: draft tokens accepted plus the bonus token, or nothing from a
    prompt chunk.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] | None = None
    top_logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    drafted: int = 0
    accepted: int = 0
    weight_version: str = ""
    error: TltError | None = None  # the sequence cannot go on
