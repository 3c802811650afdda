"""History's continuations in other drafters' trees: against a slow twin, and their trust."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.fake_eagle import FakeEngine, FakeNetwork
from tlt_server.speculation.batch import Candidates
from tlt_server.speculation.branches import (
    FLOOR,
    LEFTS,
    RANK,
    Branching,
    grafted_onto,
    prior,
    with_branches,
)
from tlt_server.speculation.calibration import CELLS, Calibration
from tlt_server.speculation.drafters.cpu import DraftSetup, DraftWeights
from tlt_server.speculation.drafters.eagle import Eagle
from tlt_server.speculation.drafters.history import DEPTHS, History
from tlt_server.speculation.estimate import AcceptanceEstimate
from tlt_server.speculation.tree import select
from tlt_server.wire.records import Strategy

CHAIN = Strategy("eagle", 5, 1, 9)


def candidates_of(nodes: list[tuple[int, int, int, int, int, float, int]]) -> Candidates:
    """nodes: (request, parent, token, depth, rank, survival, cell)."""
    columns = [*zip(*nodes, strict=True)] or [()] * 7
    arrays = [np.array(column, np.int32) for column in columns]
    arrays[5] = np.array(columns[5], np.float32)
    return Candidates(*arrays)


@st.composite
def trees_and_chains(draw: st.DrawFn) -> tuple[Candidates, Candidates, int]:
    """Trees with few tokens, so that chains often follow them; one chain for some requests."""
    requests = draw(st.integers(1, 3))
    trees: list[tuple[int, int, int, int, int, float, int]] = []
    chains: list[tuple[int, int, int, int, int, float, int]] = []
    for b in range(requests):
        first, families = len(trees), {-1: set[int]()}
        for _ in range(draw(st.integers(0, 7))):
            above = draw(st.sampled_from(sorted(families)))
            token = draw(st.integers(0, 3))
            if token in families[above]:
                continue
            rank = len(families[above])
            families[above].add(token)
            depth, acceptance = (
                (trees[above][3] + 1, trees[above][5]) if above >= first else (1, 1.0)
            )
            chance = draw(st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0]))  # sums are exact
            families[len(trees)] = set()
            trees.append((b, above, token, depth, rank, acceptance * chance, 3))
        above = -1
        for depth in range(1, draw(st.integers(0, 5)) + 1):
            cell = draw(st.integers(0, 7 * 8 * DEPTHS - 1))
            chains.append((b, above, draw(st.integers(0, 3)), depth, 0, 0.5, cell))
            above = len(chains) - 1
    return candidates_of(trees), candidates_of(chains), requests


def paths_of(found: Candidates) -> dict[tuple[int, ...], int]:
    """Return the node of every path (request, token, token ...)."""
    paths: list[tuple[int, ...]] = []
    for n, parent in enumerate(found.parent_N):
        above = paths[parent] if parent >= 0 else (int(found.request_N[n]),)
        paths.append((*above, int(found.token_N[n])))
    assert len(set(paths)) == len(paths), "two siblings have the same token"
    return {path: n for n, path in enumerate(paths)}


def grafted_slowly(
    trees: Candidates, chains: Candidates, requests: int, table: np.ndarray
) -> dict[tuple[int, ...], tuple[float, int]]:
    """Return the new nodes by path: survival and cell."""
    of_tree, new = paths_of(trees), {}
    for b in range(requests):
        path, above = (b,), 1.0
        for h in np.flatnonzero(chains.request_N == b):
            longer = (*path, int(chains.token_N[h]))
            if longer in of_tree:
                path, above = longer, float(trees.acceptance_N[of_tree[longer]])
                continue
            family = [n for p, n in of_tree.items() if p[:-1] == path]
            rest = max(0.0, above - sum(float(trees.acceptance_N[n]) for n in family))
            left = min(int(LEFTS * rest / max(above, 1e-9)), LEFTS - 1)
            cell = int(chains.cell_N[h]) // DEPTHS * LEFTS + left
            above *= float(table[cell])
            if above < FLOOR:
                break
            path = longer
            new[path] = (above, CELLS + cell)
    return new


@pytest.mark.slow
@given(trees_and_chains())
@settings(max_examples=200, deadline=None)
def test_branches_equal_their_twin_and_keep_trees_well_formed(
    case: tuple[Candidates, Candidates, int],
) -> None:
    trees, chains, requests = case
    table = np.random.default_rng(0).random(len(prior())).astype(np.float32)
    found = grafted_onto(trees, chains, requests, table)
    before, after = paths_of(trees), paths_of(found)
    expected = grafted_slowly(trees, chains, requests, table)
    assert set(after) == set(before) | set(expected)
    for path, n in after.items():
        parent = found.parent_N[n]
        assert parent < n and found.depth_N[n] == len(path) - 1
        assert found.acceptance_N[n] <= (found.acceptance_N[parent] if parent >= 0 else 1.0)
        if path in before:
            at = before[path]
            assert found.acceptance_N[n] == trees.acceptance_N[at]
            assert found.rank_N[n] == trees.rank_N[at] and found.cell_N[n] == trees.cell_N[at]
        else:
            acceptance, cell = expected[path]
            assert found.rank_N[n] == RANK
            np.testing.assert_allclose(found.acceptance_N[n], acceptance, rtol=1e-5)
            assert found.cell_N[n] == cell
    assert (np.diff(found.request_N) >= 0).all()
    assert all(a.dtype == np.int32 for a in (found.request_N, found.parent_N, found.rank_N))
    chosen = select(found, requests, len(found) // 2)
    assert all(found.parent_N[n] in {-1, *chosen.node_M} for n in chosen.node_M)


def drafters(engine: FakeEngine) -> tuple[Eagle, History, Branching]:
    weights = DraftWeights(FakeNetwork(), Calibration())
    eagle = Eagle.make(DraftSetup("eagle", engine.cache, weights, max_requests=8, max_rows=200))
    made = with_branches({"eagle": eagle, "history": (source := History())})
    assert made["history"] is source and isinstance(made["eagle"], Branching)
    return eagle, source, made["eagle"]


def repeating(length: int = 30) -> FakeEngine:
    engine = FakeEngine()
    engine.extend("a", [1 + i % 5 for i in range(length)])
    return engine


def test_only_chains_missing_from_the_tree_are_added() -> None:
    engine = repeating()
    eagle, _, branching = drafters(engine)
    engine.extend("b", [7, 3, 9, 11, 2])
    batch = engine.batch(["a", "b"])
    alone = eagle.propose(batch, CHAIN)
    both = branching.propose(batch, CHAIN)
    extra = paths_of(both).keys() - paths_of(alone).keys()
    assert {path[0] for path in extra} == {0}, "only one request repeats itself"
    assert (0, 1, 2, 3, 4, 5) in paths_of(both)
    nothing = replace(batch, drafters=["eagle", "eagle"])
    assert len(branching.propose(nothing, CHAIN)) == len(alone), "history may not draft here"


def test_branch_and_draft_tables_learn_from_their_own_nodes() -> None:
    engine = repeating()
    eagle, source, branching = drafters(engine)
    batch = engine.batch(["a"])
    found = branching.propose(batch, CHAIN)
    branch_N = found.rank_N == RANK
    accepted_N = branch_N.astype(np.int8)
    accepted_N[found.parent_N[branch_N]] = 1  # the tree's nodes that the branch stands on
    for _ in range(300):
        branching.observe(batch, found, accepted_N)
    cells = found.cell_N[branch_N] - CELLS
    assert (branching.table.acceptance_K[cells] > prior()[cells]).all()
    assert eagle.calibration.observed == 300 * int((~branch_N & _tried(found, accepted_N)).sum())
    assert source.table.observed == 0
    branching.observe(batch, Candidates.empty(), np.zeros(0, np.int8))


def _tried(found: Candidates, accepted_N: np.ndarray) -> np.ndarray:
    return (found.parent_N < 0) | (accepted_N[found.parent_N] == 1)


def test_higher_draft_acceptance_lowers_that_of_branches() -> None:
    chain = candidates_of([(0, -1, 9, 1, 0, 0.5, 6 * 8 * DEPTHS + 7 * DEPTHS)])
    acceptance = []
    for sure in (0.05, 0.5, 0.95):
        tree = candidates_of([(0, -1, 4, 1, 0, sure, 0)])
        found = grafted_onto(tree, chain, 1, prior())
        acceptance.append(float(found.acceptance_N[found.rank_N == RANK].sum()))
    assert acceptance[0] > acceptance[1] > acceptance[2]


def test_acceptance_estimate_leaves_branches_out() -> None:
    chain = [(0, n - 1, 5, n + 1, 0, 0.5 ** (n + 1), 0) for n in range(3)]
    rival = [(0, -1 if n == 3 else n - 1, 6, n - 2, RANK, 0.4, CELLS) for n in (3, 4)]
    estimates = []
    for nodes in (chain, [*chain, *rival]):
        estimate = AcceptanceEstimate((1, 2, 3, 5), (1, 2))
        for _ in range(200):
            estimate.see(candidates_of(nodes), 1)
        estimates.append(estimate)
    alone, both = estimates
    assert alone.record().rate == both.record().rate
    many = np.array([60.0])
    for depth in (2, 3, 5):
        for width in (1, 2):
            more = both.gain(depth, width, many) - alone.gain(depth, width, many)
            np.testing.assert_allclose(more, 2 * 0.4, rtol=0.01)
    more = both.gain(1, 1, many) - alone.gain(1, 1, many)
    np.testing.assert_allclose(more, 0.4, rtol=0.01)
