"""Whom ranks have waited for in vain reaches all of them with the sums of their states."""

from __future__ import annotations

from functools import partial

import torch

from tests.engine.lockstep import LockstepPeers, Turns, group, in_lockstep
from tests.kernels.triton_tests import DEVICE
from tlt_kernels.gpu.accept import fields
from tlt_kernels.gpu.agreement import SUM_FLOATS
from tlt_kernels.gpu.tensors import RowTable
from tlt_server.engine.gpu.steps.agreement import Agreement, differing, missed


def missed_by(number: int) -> torch.Tensor:
    """Say that rank 0 was waited for in this exchange."""
    return torch.tensor([1, number], dtype=torch.int32, device=DEVICE)


def test_ranks_see_whom_each_has_waited_for() -> None:
    turns = Turns(2)
    peers = [LockstepPeers(each, turns) for each in group(2, SUM_FLOATS)]
    agreements = [Agreement(each) for each in peers]
    for each in peers:
        each.missed = torch.zeros_like(missed_by(0))
    rows, hidden_RH = RowTable.allocate(1, 1, device=DEVICE), torch.ones(1, 32, device=DEVICE)
    outcome_EF = torch.zeros(1, fields(2), dtype=torch.int32, device=DEVICE)

    def found() -> list[tuple[int, int]]:
        [words, others] = [each.found_TW.flatten().tolist() for each in agreements]
        assert words == others and differing(words) == []
        return missed(words)

    add = [partial(each.add, hidden_RH, rows, outcome_EF) for each in agreements]
    in_lockstep(turns, add)
    assert found() == [(0, 0), (0, 0)]
    peers[1].missed = missed_by(27)
    in_lockstep(turns, [each.gather_again for each in agreements])
    assert found() == [(0, 0), (1, 27)]
    peers[1].missed = missed_by(28)
    in_lockstep(turns, add)
    assert found() == [(0, 0), (1, 28)]
