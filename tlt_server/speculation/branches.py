"""History's continuations as branches of another drafter's trees, so that one tree builder chooses
among the nodes of both.

A continuation follows the tree while their tokens agree, then becomes a rival child and continues
as a chain. The acceptance probability of such a node is learned online, separately from both
drafters' own tables, from history's evidence (match length, share of matches that agree) and from
the share of the parent's acceptance probability left over by the tree's own children. Rank -1 marks
these nodes. Any tree is lossless, so branches change no token. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tlt_kernels.cpu.branches import graft
from tlt_server.speculation.batch import Candidates, DraftBatch
from tlt_server.speculation.calibration import CELLS, OnlineTable
from tlt_server.speculation.drafters import DRAFTERS, history
from tlt_server.wire.records import Strategy

SOURCE = "history"
LEFTS = 8  # buckets of the survival that is left over
RANK = -1  # marks the nodes of branches
FLOOR = 0.02  # a branch ends where it survives less: its row would cost more than it brings


def prior() -> NDArray[np.float32]:
    """Return the acceptance probability before any observation: history's own, times the leftover
    share.
    """
    trust_LS = history.prior().reshape(-1, history.DEPTHS)[:, 0]
    left = (np.arange(LEFTS) + 1) / LEFTS
    return (trust_LS[:, None] * left).reshape(-1).astype(np.float32)


class Proposing(Protocol):
    """The part of `drafters.cpu.CpuDrafter` that branches need."""

    def propose(self, batch: DraftBatch, strategy: Strategy) -> Candidates: ...

    def observe(self, batch: DraftBatch, candidates: Candidates, accepted_N: object) -> None: ...


D = TypeVar("D", bound=Proposing)


class Branching:
    """A drafter whose trees get branches from another drafter. It only proposes and observes; the
    engine tells both drafters directly when requests end.
    """

    def __init__(self, drafter: Proposing, source: Proposing) -> None:
        self.drafter, self._source = drafter, source
        self.table = OnlineTable(prior())
        self._grafted = 0

    def propose(self, batch: DraftBatch, strategy: Strategy) -> Candidates:
        trees = self.drafter.propose(batch, strategy)
        chains = self._source.propose(
            self._permitted(batch), Strategy(SOURCE, strategy.depth, 1, strategy.rows)
        )
        if not len(chains):
            return trees
        grafted = grafted_onto(trees, chains, len(batch), self.table.acceptance_K)
        self._grafted += len(grafted) - len(trees)
        return grafted

    @staticmethod
    def _permitted(batch: DraftBatch) -> DraftBatch:
        """Return the batch with no room for branches in requests that exclude this drafter."""
        barred_B = np.array([name not in ("", SOURCE) for name in batch.drafters], np.bool_)
        if not barred_B.any():
            return batch
        return replace(batch, max_depth_B=np.where(barred_B, 0, batch.max_depth_B))

    def observe(self, batch: DraftBatch, candidates: Candidates, accepted_N: object) -> None:
        """Update each table by its own nodes."""
        accepted_N = np.asarray(accepted_N, np.int8)
        branch_N = candidates.rank_N == RANK
        self.drafter.observe(batch, candidates, np.where(branch_N, np.int8(-1), accepted_N))
        if not branch_N.any():
            return
        parent_N = candidates.parent_N
        tried_N = branch_N & (accepted_N >= 0) & ((parent_N < 0) | (accepted_N[parent_N] == 1))
        tried = np.flatnonzero(tried_N)
        cell = candidates.cell_N[tried] - CELLS
        self.table.observe(cell, np.full(len(cell), -1, np.int32), accepted_N[tried])

    def gauges(self) -> Mapping[str, float]:
        return {"branch_nodes": float(self._grafted), "branch_table_drift": self.table.drift}


def with_branches(drafters: Mapping[str, D]) -> dict[str, D | Branching]:
    """Return the drafters; if history is loaded, those with weights get its branches."""
    source = drafters.get(SOURCE)
    return {
        name: Branching(drafter, source)
        if source is not None and DRAFTERS[name].needs_weights
        else drafter
        for name, drafter in drafters.items()
    }


def branching(drafters: Mapping[str, Proposing]) -> dict[str, Branching]:
    return {name: each for name, each in drafters.items() if isinstance(each, Branching)}


def branches_of(drafter: str) -> str:
    """Return the table name of a drafter's branches."""
    return f"{drafter}+{SOURCE}"


def grafted_onto(
    trees: Candidates, chains: Candidates, requests: int, table_Z: NDArray[np.float32]
) -> Candidates:
    """Return the trees with the chains as branches; each request's branch follows its tree."""
    size = len(chains)
    branch_H, above_H, cell_H = (np.empty(size, np.int32) for _ in range(3))
    acceptance_H = np.empty(size, np.float32)
    count = graft(
        trees.request_N,
        trees.parent_N,
        trees.token_N,
        trees.acceptance_N,
        chains.request_N,
        chains.token_N,
        chains.cell_N // history.DEPTHS,
        requests,
        LEFTS,
        np.float32(FLOOR),
        CELLS,
        table_Z,
        branch_H,
        above_H,
        acceptance_H,
        cell_H,
    )
    if not count:
        return trees
    # A drafter without a calibration table gives its nodes no cells.
    own_cell_N = trees.cell_N if len(trees.cell_N) else np.full(len(trees), -1, np.int32)
    new = branch_H[:count]
    request_N = np.concatenate((trees.request_N, chains.request_N[new]))
    order = np.argsort(request_N, kind="stable")
    place_N = np.empty(len(order), np.int32)
    place_N[order] = np.arange(len(order), dtype=np.int32)
    parent_N = np.concatenate((trees.parent_N, above_H[:count]))[order]
    return Candidates(
        request_N[order],
        np.where(parent_N < 0, np.int32(-1), place_N[parent_N]),
        np.concatenate((trees.token_N, chains.token_N[new]))[order],
        np.concatenate((trees.depth_N, chains.depth_N[new]))[order],
        np.concatenate((trees.rank_N, np.full(count, RANK, np.int32)))[order],
        np.concatenate((trees.acceptance_N, acceptance_H[:count]))[order],
        np.concatenate((own_cell_N, cell_H[:count]))[order],
    )
