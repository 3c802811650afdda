"""Computes the accept length that drafters would have had on recorded responses, cycle by cycle.

Every response is walked from its first token: draft at the root, then continue after its accepted
drafts and one more token. On a CPU responses are walked in step, a batch of roots at a time, since
an accept length of 7 makes a seventh of all positions roots. On a GPU a small batch takes as long
as a large one, and the longest response would determine the time: there all positions are drafted
from first. Memory is bounded by staging some responses at a time. Only features may need a target
pass.

Legend: N responses, C cycles, B roots, T tokens of several concatenated responses, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tlt_server.samples.samples import Responses
from tlt_server.trainer.replaying.plans import PlannedRoots, RootPlan
from tlt_server.trainer.replaying.replay import (
    MAX_ROOTS,
    PAGE_SIZE,
    DraftReplay,
    ReplayedDrafter,
    Roots,
    StagedResponses,
)
from tlt_server.wire.records import Strategy

STRIDE = 5  # positions between the roots that a calibration is fitted to
STAGED_TOKENS = 1 << 15  # tokens whose features are in memory at once, unless a response has more


@dataclass(frozen=True)
class Walked:
    """Cycles of a drafter over responses; those of a response are in order."""

    response_C: NDArray[np.int32]
    root_C: NDArray[np.int32]
    strategy_C: NDArray[np.int32]  # index into the plan's strategies
    rows_C: NDArray[np.int32]  # verified, the root included
    accepted_C: NDArray[np.int32]
    emitted_C: NDArray[np.int32]  # tokens; a response's last cycle counts only those left

    def __len__(self) -> int:
        return len(self.root_C)

    @classmethod
    def joined(cls, parts: Sequence[Walked]) -> Walked:
        """Return all cycles, sorted by response and root."""
        names = list(cls.__dataclass_fields__)
        arrays = {
            name: np.concatenate([getattr(part, name) for part in parts])
            if parts
            else np.zeros(0, np.int32)
            for name in names
        }
        order = np.lexsort((arrays["root_C"], arrays["response_C"]))
        return cls(**{name: array[order] for name, array in arrays.items()})


class FeatureSource(Protocol):
    """The target's features of recorded responses: captured by the engine, or recomputed."""

    @property
    def width(self) -> int:
        """Return F."""

    def features(self, responses: Responses, chosen: Sequence[int]) -> Tensor:
        """Return the features of all tokens of these responses, float32 [T, F] on the CPU."""


class Task(NamedTuple):
    """A drafter, and the plan of its roots."""

    drafter: ReplayedDrafter
    plan: RootPlan


def evaluate(
    responses: Responses,
    chosen: Sequence[int],
    tasks: Sequence[Task],
    stage: ReplayStage,
    *,
    on_response: Callable[[int], None] = lambda count: None,
) -> list[Walked]:
    """Return the cycles of each task over these responses. `on_response`: called with the number of
    finished responses of a task.
    """
    found: list[list[Walked]] = [[] for _ in tasks]
    for part, replays in stage.parts(responses, chosen, [task.drafter for task in tasks]):
        for task, replay, walked in zip(tasks, replays, found, strict=True):
            walked.append(walk(replay, part, task.plan))
            on_response(len(part))
    return [Walked.joined(parts) for parts in found]


class ReplayStage:
    """A stage for some responses at a time, with a replay of each drafter on them. Its buffers are
    reused, and grow only when responses need more pages than ever before.
    """

    def __init__(self, source: FeatureSource) -> None:
        self._source = source
        self._pages = 0  # needed by the largest part
        self._staged: StagedResponses | None = None
        self._replays: dict[int, DraftReplay] = {}  # by id of the drafter

    def reserve(self, lengths: NDArray[np.int64]) -> None:
        """Make the next buffers large enough for responses of these lengths in one call."""
        self._cut(range(len(lengths)), lengths)

    def parts(
        self, responses: Responses, chosen: Sequence[int], drafters: Sequence[ReplayedDrafter]
    ) -> Iterator[tuple[list[int], list[DraftReplay]]]:
        """Yield parts of the responses, staged, and a replay of each drafter on them."""
        parts = self._cut(chosen, responses.prompt_len_N + responses.output_len_N)
        if self._staged is None or self._staged.cache.pages < self._pages:
            self._replays.clear()  # before others are made: they are large
            self._staged = StagedResponses(self._source.width, self._pages)
        staged = self._staged
        replays = [self._replay(drafter, staged) for drafter in drafters]
        for part in parts:
            staged.stage(responses, part, self._source.features(responses, part))
            yield part, replays

    def _replay(self, drafter: ReplayedDrafter, staged: StagedResponses) -> DraftReplay:
        # A replay holds its drafter, so no other one has this id.
        if id(drafter) not in self._replays:
            self._replays[id(drafter)] = DraftReplay(drafter, staged)
        return self._replays[id(drafter)]

    def _cut(self, chosen: Sequence[int], lengths: NDArray[np.int64]) -> list[list[int]]:
        parts = [*_parts(sorted(chosen, key=lambda n: int(lengths[n])), lengths)]
        for part in parts:
            self._pages = max(self._pages, sum(_pages_of(int(lengths[n])) for n in part))
        return parts


def _pages_of(length: int) -> int:
    return -(-length // PAGE_SIZE)


def _parts(chosen: Sequence[int], lengths: NDArray[np.int64]) -> Iterator[list[int]]:
    part: list[int] = []
    tokens = 0
    for n in chosen:
        size = _pages_of(int(lengths[n])) * PAGE_SIZE
        if part and (tokens + size > STAGED_TOKENS or len(part) == MAX_ROOTS):
            yield part
            part, tokens = [], 0
        part.append(n)
        tokens += size
    if part:
        yield part


def fit_calibration(
    drafter: ReplayedDrafter,
    responses: Responses,
    chosen: Sequence[int],
    stage: ReplayStage,
    shape: Strategy,
) -> None:
    """Correct the drafter's calibration table by whole trees of this shape, from every `STRIDE`-th
    output token of these responses.
    """
    for _, (replay,) in stage.parts(responses, chosen, [drafter]):
        staged = replay.staged
        output_T = staged.position_T - np.repeat(staged.prompt_len_N, staged.length_N)
        before_T = staged.position_T < np.repeat(staged.length_N - 1, staged.length_N)
        own_T = (output_T >= 0) & (output_T % STRIDE == 0) & before_T
        response_B = np.repeat(np.arange(len(staged.length_N)), staged.length_N)[own_T]
        if len(response_B):
            rows_B = np.full(len(response_B), shape.rows, np.int32)
            roots = Roots(response_B, staged.position_T[own_T], rows_B)
            replay.calibrate(roots, shape.depth, shape.width)


def walk(replay: DraftReplay, part: Sequence[int], plan: RootPlan) -> Walked:
    """Walk the staged responses, whose numbers are `part`."""
    number_N, staged = np.array(part, np.int64), replay.staged
    first_N = plan.first(number_N, staged.prompt_len_N.astype(np.int64))
    accepted_T: NDArray[np.int32] | None = None
    if replay.all_at_once:
        own_T = staged.position_T >= np.repeat(first_N, staged.length_N)
        own_T &= staged.position_T < np.repeat(staged.length_N - 1, staged.length_N)
        response_B = np.repeat(np.arange(len(part)), staged.length_N)[own_T]
        position_B = staged.position_T[own_T]
        planned = plan.at(number_N[response_B], position_B)
        accepted_T = np.zeros(len(own_T), np.int32)
        accepted_T[own_T] = _accepted(replay, plan, response_B, position_B, planned)
    live_B, root_B = np.arange(len(part)), first_N
    cycles: list[Walked] = []
    while True:
        more_B = root_B < staged.length_N[live_B] - 1
        live_B, root_B = live_B[more_B], root_B[more_B]
        if not len(live_B):
            return Walked.joined(cycles)
        planned = plan.at(number_N[live_B], root_B)
        accepted_B = (
            _accepted(replay, plan, live_B, root_B, planned)
            if accepted_T is None
            else accepted_T[staged.start_N[live_B] + root_B]
        )
        left_B = staged.length_N[live_B] - 1 - root_B
        emitted_B = np.minimum(accepted_B + 1, left_B)
        drafts_B = planned.rows_B > 0
        kept = np.flatnonzero(drafts_B)
        columns = (
            number_N[live_B],
            root_B,
            planned.strategy_B,
            planned.rows_B,
            accepted_B,
            emitted_B,
        )
        cycles.append(Walked(*(column[kept].astype(np.int32) for column in columns)))
        root_B = np.where(drafts_B, root_B + emitted_B, planned.next_B)


def _accepted(
    replay: DraftReplay,
    plan: RootPlan,
    response_B: NDArray[np.int64],
    root_B: NDArray[np.int64],
    planned: PlannedRoots,
) -> NDArray[np.int32]:
    """Return the accepted drafts of each root, [B]; 0 for roots outside the plan."""
    roots, drafts_B = Roots(response_B, root_B, planned.rows_B), planned.rows_B > 0
    accepted_B = np.zeros(len(root_B), np.int32)
    for index in np.unique(planned.strategy_B[drafts_B]).tolist():
        strategy = plan.strategies[index]
        same = np.flatnonzero(drafts_B & (planned.strategy_B == index))
        accepted_B[same] = replay.accepted(
            roots.part(same),
            strategy.depth,
            strategy.width,
            floored=plan.floored or strategy.width > 1,
        )
    return accepted_B
