"""The top-R cut against a sort and against all choices there are, and its promises for any
candidates of a drafter.
"""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_server.speculation.batch import Candidates
from tlt_server.speculation.tree import select


def select_slowly(candidates, budget, most=None):
    """Sort by (survival, depth, index), a survival being at most its parent's; group by request."""
    acceptance = []
    for n, parent in enumerate(candidates.parent_N):
        own = float(candidates.acceptance_N[n])
        acceptance.append(own if parent < 0 else min(own, acceptance[parent]))
    best, left = [], dict(enumerate(most if most is not None else ()))
    for n in sorted(
        range(len(candidates)), key=lambda n: (-acceptance[n], candidates.depth_N[n], n)
    ):
        request = candidates.request_N[n]
        if len(best) < budget and left.get(request, 1) > 0:
            best.append(n)
            if request in left:
                left[request] -= 1
    nodes = sorted(best, key=lambda n: (candidates.request_N[n], n))
    place = {n: m for m, n in enumerate(nodes)}
    return nodes, [
        place[candidates.parent_N[n]] if candidates.parent_N[n] >= 0 else -1 for n in nodes
    ]


@st.composite
def forests(draw):
    requests = draw(st.integers(1, 5))
    nodes = draw(st.integers(0, 40))
    probability = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.5, 0.9, 1.0])
    request, parent, depth, acceptance = [], [], [], []
    for n in range(nodes):
        above = draw(st.integers(-1, n - 1))
        request.append(draw(st.integers(0, requests - 1)) if above < 0 else request[above])
        parent.append(above)
        depth.append(1 if above < 0 else depth[above] + 1)
        acceptance.append(draw(probability) * (1.0 if above < 0 else acceptance[above]))
    i32 = lambda values: np.array(values, np.int32)  # noqa: E731
    zeros = np.zeros(nodes, np.int32)
    return Candidates(
        i32(request), i32(parent), zeros, i32(depth), zeros, np.array(acceptance, np.float32)
    ), requests


@pytest.mark.slow
@given(forests(), st.integers(-1, 45), st.lists(st.integers(0, 6), min_size=5, max_size=5))
@settings(max_examples=300, deadline=None)
def test_selection_is_the_sorted_top_within_each_requests_limit(forest, budget, most):
    candidates, requests = forest
    for limits in (None, most):
        check_select(candidates, requests, budget, limits)


def check_select(candidates, requests, budget, most):
    most_B = None if most is None else np.array(most[:requests], np.int32)
    chosen = select(candidates, requests, budget, most_B)
    nodes, parents = select_slowly(candidates, budget, most)
    assert chosen.node_M.tolist() == nodes
    assert chosen.parent_M.tolist() == parents
    assert chosen.count_B.tolist() == [
        sum(candidates.request_N[n] == b for n in nodes) for b in range(requests)
    ]
    for m, parent in enumerate(chosen.parent_M):
        assert parent < m
        assert (candidates.parent_N[chosen.node_M[m]] < 0) == (parent < 0)


def test_selection_keeps_parents_when_a_child_is_more_likely():
    i32 = lambda *values: np.array(values, np.int32)  # noqa: E731
    candidates = Candidates(
        i32(0, 0, 0),
        i32(-1, 0, -1),
        i32(5, 6, 7),
        i32(1, 2, 1),
        i32(0, 0, 1),
        np.array([0.2, 0.9, 0.5], np.float32),
    )
    assert select(candidates, 1, 2).node_M.tolist() == [0, 2]
    assert select(candidates, 1, 1).node_M.tolist() == [2]


def test_select_reads_nan_as_zero():
    i32 = lambda *values: np.array(values, np.int32)  # noqa: E731
    candidates = Candidates(
        i32(0, 0), i32(-1, -1), i32(5, 6), i32(1, 1), i32(0, 1), np.array([np.nan, 0.1], np.float32)
    )
    assert select(candidates, 1, 1).node_M.tolist() == [1]


def test_selection_from_no_candidates_is_empty():
    assert select(Candidates.empty(), 3, 10).count_B.tolist() == [0, 0, 0]


def small_forest(rng, requests):
    """Return trees of at most six nodes each, in any shape."""
    request, parent, acceptance = [], [], []
    for b in range(requests):
        first = len(request)
        for n in range(first, first + rng.integers(0, 7)):
            above = int(rng.integers(first - 1, n))
            parent.append(above if above >= first else -1)
            acceptance.append(rng.random() * (acceptance[above] if above >= first else 1.0))
            request.append(b)
    depth = []
    for above in parent:
        depth.append(1 if above < 0 else depth[above] + 1)
    columns = (np.array(values, np.int32) for values in (request, parent, parent, depth, parent))
    return Candidates(*columns, np.array(acceptance, np.float32))


def best_sums(candidates, request, most):
    """Return the largest sum of survivals by number of nodes, over all subtrees of a request."""
    nodes = np.flatnonzero(candidates.request_N == request).tolist()
    return [
        max(
            candidates.acceptance_N[list(some)].sum(dtype=np.float64)
            for some in combinations(nodes, size)
            if all(candidates.parent_N[n] in (-1, *some) for n in some)
        )
        for size in range(min(len(nodes), most) + 1)
    ]


def test_selected_subtree_has_the_best_total_acceptance():
    rng = np.random.default_rng(3)
    for case in range(60):
        requests = int(rng.integers(2, 5))
        candidates = small_forest(rng, requests)
        most_B = rng.integers(0, 5, requests).astype(np.int32) if case % 2 else None
        limits = [6] * requests if most_B is None else most_B.tolist()
        sums = [best_sums(candidates, b, limits[b]) for b in range(requests)]
        shared = [*product(*(range(len(by_size)) for by_size in sums))]
        for rows in range(1, 9):
            best = max(
                sum(by_size[size] for by_size, size in zip(sums, sizes, strict=True))
                for sizes in shared
                if sum(sizes) <= rows
            )
            chosen = select(candidates, requests, rows, most_B)
            found = candidates.acceptance_N[chosen.node_M].sum(dtype=np.float64)
            assert abs(found - best) < 1e-6, (case, rows)
            assert len(chosen.node_M) == min(rows, max(map(sum, shared)))
            assert all(n in (-1, *chosen.node_M) for n in candidates.parent_N[chosen.node_M])
