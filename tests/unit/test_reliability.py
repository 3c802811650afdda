"""Reliability of survivals: sums by drafter, depth and predicted probability."""

from __future__ import annotations

import numpy as np
import pytest

from tlt_server.bench.replaying.reliability import Reliability
from tlt_server.speculation.batch import Candidates


def roots(survival: list[float], *, rank: int = 0) -> Candidates:
    """Children of roots, one of each request."""
    many = len(survival)
    none_N = np.zeros(many, np.int32)
    return Candidates(
        np.arange(many, dtype=np.int32),
        none_N - 1,
        none_N,
        none_N + 1,
        none_N + rank,
        np.array(survival, np.float32),
    )


def test_a_calibrated_drafter_lies_on_the_diagonal() -> None:
    known = Reliability()
    known.add(
        "eagle", roots([0.25] * 8 + [1.0] * 2), np.array([True, True, *[False] * 6, True, True])
    )
    (curve,) = known.curves("eagle", fewest=2)
    assert curve.depth == 1
    assert curve.predicted_B.tolist() == curve.accepted_B.tolist() == [0.25, 1.0]
    assert curve.nodes_B.tolist() == [8, 2]
    assert known.errors() == {"eagle": 0}
    assert not [*known.curves("eagle", fewest=9)]


def test_branches_count_for_themselves() -> None:
    known = Reliability()
    known.add("eagle", roots([0.5, 0.5]), np.array([True, True]))
    known.add("eagle", roots([0.75], rank=-1), np.array([False]))
    assert known.errors() == pytest.approx({"eagle": 0.5, "branches of eagle": 0.75})
