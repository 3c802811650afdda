"""The check that all ranks hold alike what they should: each adds every step to a sum in its
window, and rank 0 reads all of them with the step's outcome.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tlt_kernels.gpu.agreement import SUM_FLOATS, add_states
from tlt_kernels.gpu.exchange import RankPeers
from tlt_kernels.gpu.tensors import RowTable


class Agreement:
    def __init__(self, peers: RankPeers) -> None:
        self._peers = peers
        # Between two steps' sums lie exchanges of layers, which prove that all have been read.
        self._mine = peers.room(0)[-SUM_FLOATS:].view(torch.int32)[:2]
        self.found_TW = torch.zeros(peers.ranks, 2, dtype=torch.int32, device=peers.device)

    def add(self, hidden_RH: Tensor, rows: RowTable, outcome_EF: Tensor) -> None:
        """Add a step, as part of its pass, and gather the sums of all ranks."""
        add_states(hidden_RH, rows, outcome_EF, self._mine.view(torch.int64))
        self._peers.gather(self._mine, self.found_TW)

    def begin(self) -> None:
        """Begin with sums of zero, while no rank exchanges."""
        self._mine.zero_()
        self._peers.reset()

    def failure(self) -> str:
        """Return which rank was waited for in vain, or nothing. It may wait for the device."""
        return self._peers.failure()


def differing(words: Sequence[int]) -> list[int]:
    """Return the ranks whose sums are not rank 0's."""
    sums = list(zip(words[::2], words[1::2], strict=True))
    return [rank for rank, each in enumerate(sums) if each != sums[0]]
