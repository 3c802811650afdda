"""Drafters of a replay: recorded trees under the table that the replay has learned so far.

`RecordedDrafts` answers like the drafter: the record has the nodes, their cells and which of them
the response follows. Acceptance probabilities follow from the active table, and nodes that this
table and the budget would have excluded are cut off. Drafters that read only text are not recorded:
the CPU's own run on the replayed text.

Legend: B requests, M nodes of a request, P recorded positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tlt_server.errors import StartupError
from tlt_server.speculation.batch import Candidates, DraftBatch
from tlt_server.speculation.branches import Branching, Proposing
from tlt_server.speculation.calibration import OnlineTable
from tlt_server.speculation.drafters import DRAFTERS
from tlt_server.speculation.drafters.eagle import FLOOR
from tlt_server.speculation.drafters.history import History
from tlt_server.speculation.node_table import candidates_of
from tlt_server.speculation.recorded import NONE, RecordedTrees, RecordHeader, RolloutRecord
from tlt_server.wire.records import Strategy


class Drafts(Proposing, Protocol):
    """The part of `drafters.cpu.CpuDrafter` that a replay needs."""

    def finish(
        self, request_id: str, group_id: str, tokens: object, prompt_len: int, salt: str = ""
    ) -> None: ...


class _Grown(NamedTuple):
    """Recorded trees of one width, with levels and depths derived from their parents."""

    trees: RecordedTrees
    level_PM: NDArray[np.uint8]
    depth_PM: NDArray[np.uint8]


def drafts_of(record: RolloutRecord) -> dict[str, Drafts]:
    """Return the drafters of the recorded engine."""
    found: dict[str, Drafts] = {}
    for name in record.header.drafters:
        if name in record.tables:
            found[name] = RecordedDrafts(record, name)
        elif name == "history":
            found[name] = History()
    return found


class RecordedDrafts:
    def __init__(self, record: RolloutRecord, drafter: str) -> None:
        self._record, self.drafter = record, drafter
        self.table = OnlineTable(record.tables[drafter].survival_K)
        self._position_N = record.responses.position_N
        self._grown = {
            trees.width: _grown(record.trees[trees.name], trees.width)
            for trees in record.header.trees
            if trees.drafter == drafter
        }
        # A CPU cuts trees that do not fit its scratch; a GPU has cut the strategy before.
        on_cpu = record.header.device == "cpu"
        self._max_rows = record.header.max_draft_rows if on_cpu else None

    def propose(self, batch: DraftBatch, strategy: Strategy) -> Candidates:
        requests, width, depth = len(batch), strategy.width, strategy.depth
        limit_B = np.minimum(batch.max_depth_B, depth)
        if self._max_rows is not None and requests:
            limit_B = np.minimum(limit_B, 1 + self._max_rows // requests)
            deepest = int(limit_B.max(initial=0))
            if deepest > 1 and self._max_rows < requests * (deepest - 1):
                limit_B = np.minimum(limit_B, 1)
        if not requests or width <= 0 or limit_B.max() <= 0:
            return Candidates.empty()
        grown = self._of(width, int(limit_B.max()))
        known_B = np.array([len(tokens) for tokens in batch.tokens]) - batch.prompt_len_B
        index_B = np.array([int(name) for name in batch.ids])
        at_B = self._position_N[index_B] + known_B
        columns = width + (int(limit_B.max()) - 1) * width**2
        cell_BM = grown.trees.cell_PM[at_B, :columns].astype(np.int32)
        parent_BM = grown.trees.parent_PM[at_B, :columns]
        depth_BM = grown.depth_PM[at_B, :columns].astype(np.int32)
        level_BM = grown.level_PM[at_B, :columns]
        live_BM = np.arange(cell_BM.shape[1]) < grown.trees.count_P[at_B][:, None]
        live_BM &= (depth_BM <= limit_B[:, None]) & (level_BM < int(limit_B.max()))
        acceptance_BM = self._acceptance(cell_BM, parent_BM)
        budget = strategy.draft_rows(requests) if self._max_rows is not None else 0
        _cut(live_BM, acceptance_BM, parent_BM, level_BM, budget)
        token_BM = self._tokens(grown, at_B, index_B, batch, cell_BM.shape[1])
        above_BM = np.where(parent_BM == NONE, np.int32(-1), parent_BM.astype(np.int32))
        acceptance_BM = np.where(live_BM, acceptance_BM, np.float32(-1))
        columns = cell_BM.shape[1]
        return candidates_of(
            columns,
            columns,
            above_BM.reshape(-1),
            depth_BM.reshape(-1),
            acceptance_BM.reshape(-1),
            token_BM.reshape(-1),
            cell_BM.reshape(-1),
        )

    def observe(self, batch: DraftBatch, candidates: Candidates, accepted_N: object) -> None:
        self.table.observe(candidates.cell_N, candidates.parent_N, np.asarray(accepted_N, np.int8))

    def finish(
        self, request_id: str, group_id: str, tokens: object, prompt_len: int, salt: str = ""
    ) -> None:
        """Do nothing: the positions suffice."""

    @property
    def deepest(self) -> dict[int, int]:
        """Return the levels of the recorded trees, by width."""
        return {width: grown.trees.own_PD.shape[1] for width, grown in self._grown.items()}

    def _of(self, width: int, depth: int) -> _Grown:
        check_strategy(self._record.header, Strategy(self.drafter, depth, width))
        return self._grown[width]

    def _acceptance(
        self, cell_BM: NDArray[np.int32], parent_BM: NDArray[np.uint16]
    ) -> NDArray[np.float32]:
        chance_BM = np.clip(self.table.acceptance_K[cell_BM], np.float32(0), np.float32(1))
        acceptance_BM = np.empty_like(chance_BM)
        rows = np.arange(len(cell_BM))
        for m in range(cell_BM.shape[1]):
            parent_B = parent_BM[:, m]
            above_B = np.where(
                parent_B == NONE,
                np.float32(1),
                acceptance_BM[rows, np.minimum(parent_B, max(m - 1, 0))] if m else np.float32(1),
            )
            acceptance_BM[:, m] = above_B * chance_BM[:, m]
        return acceptance_BM

    def _tokens(
        self,
        grown: _Grown,
        at_B: NDArray[np.int64],
        index_B: NDArray[np.int64],
        batch: DraftBatch,
        columns: int,
    ) -> NDArray[np.int32]:
        """Return the response's token at its own nodes, else -1."""
        token_BM = np.full((len(at_B), columns), -1, np.int32)
        own_BD = grown.trees.own_PD[at_B]
        b, d = np.nonzero(own_BD < columns)
        responses = self._record.responses
        next_B = responses.start_N[index_B] + np.array([len(tokens) for tokens in batch.tokens])
        token_BM[b, own_BD[b, d]] = responses.token_T[next_B[b] + d]
        return token_BM


def check_strategy(header: RecordHeader, strategy: Strategy) -> None:
    """Raise `StartupError` if the record does not contain the drafts of this strategy."""
    drafter = strategy.drafter
    if drafter not in header.drafters:
        raise StartupError(
            f"a strategy is of the drafter {drafter[:80]!r}; the record has "
            f"{', '.join(header.drafters) or 'none'}: use one of these"
        )
    depths = {trees.width: trees.depth for trees in header.trees if trees.drafter == drafter}
    if not depths:
        return  # it drafts from text
    if strategy.width not in depths:
        raise StartupError(
            f"a strategy of {drafter} has {strategy.width} children per node; the record has trees "
            f"of {', '.join(map(str, depths))}: record it with --width {strategy.width}"
        )
    if strategy.depth > depths[strategy.width]:
        raise StartupError(
            f"a strategy of {drafter} is {strategy.depth} deep; the record has trees of "
            f"{depths[strategy.width]} levels: use a shallower one"
        )


def _grown(trees: RecordedTrees, width: int) -> _Grown:
    """Find the level and the depth of every node. A level adds the children of up to `width` nodes
    of earlier levels. If it adds fewer, no older node was left to expand, so the next family's
    parent is in that level itself.
    """
    parent_PM = trees.parent_PM
    positions, columns = parent_PM.shape
    level_PM = np.zeros(parent_PM.shape, np.uint8)
    depth_PM = np.ones(parent_PM.shape, np.uint8)
    rows = np.arange(positions)
    level_P, families_P = np.zeros(positions, np.uint8), np.ones(positions, np.uint8)
    for m in range(1, columns):
        parent_P = parent_PM[:, m]
        inner = parent_P != NONE
        above_P = np.minimum(parent_P, m - 1)
        fresh = inner & (parent_P != parent_PM[:, m - 1])
        full = (families_P == width) | (level_P == 0)
        onward = fresh & (full | (level_PM[rows, above_P] == level_P))
        level_P[onward] += 1
        families_P = np.where(onward, 1, families_P + fresh).astype(np.uint8)
        level_PM[:, m] = level_P
        depth_PM[:, m] = np.where(inner, depth_PM[rows, above_P] + 1, 1)
    return _Grown(trees, level_PM, depth_PM)


def _cut(
    live_BM: NDArray[np.bool_],
    acceptance_BM: NDArray[np.float32],
    parent_BM: NDArray[np.uint16],
    level_BM: NDArray[np.uint8],
    budget: int,
) -> None:
    """Remove families whose parent would not have been expanded: its acceptance probability does
    not exceed the floor, or that of the `budget`-th best node known before its level.
    """
    rows = np.arange(len(live_BM))[:, None]
    above_BM = np.where(parent_BM == NONE, 0, parent_BM)
    for level in range(1, int(level_BM.max(initial=0)) + 1):
        bar, known = np.float32(FLOOR), acceptance_BM[live_BM & (level_BM < level)]
        if 0 < budget <= len(known):
            bar = max(bar, np.partition(known, len(known) - budget)[len(known) - budget])
        grows_BM = live_BM[rows, above_BM] & (acceptance_BM[rows, above_BM] > bar)
        live_BM &= (level_BM != level) | grows_BM


def shapes_of(drafts: Proposing, drafter: str, device: str) -> Iterator[tuple[int, int]]:
    """Yield the available depths and widths of trees."""
    recorded = drafts.drafter if isinstance(drafts, Branching) else drafts
    half = DRAFTERS[drafter].half(device)
    deepest = dict.fromkeys(half.widths, half.deepest)
    if isinstance(recorded, RecordedDrafts):
        deepest = recorded.deepest
    for width, most in deepest.items():
        for depth in half.depths:
            if depth <= most:
                yield depth, width
