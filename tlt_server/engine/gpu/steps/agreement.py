"""The check that all ranks hold equal values: each adds every step to a checksum in its window, and
rank 0 reads all checksums with the step's outcome, and which waits of the ranks ran out of time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tlt_kernels.gpu.agreement import SUM_FLOATS, add_states
from tlt_kernels.gpu.exchange import RankPeers
from tlt_kernels.gpu.tensors import RowTable

# Those of a rank are its sum, and `RankPeers.missed`.
WORDS = 4


class Agreement:
    def __init__(self, peers: RankPeers) -> None:
        self.peers = peers
        # Between two steps' sums lie exchanges of layers, which prove that all have been read;
        # between the two gathers of one step, perhaps none.
        first, second = peers.room(0)[-SUM_FLOATS:].view(torch.int32).chunk(2)
        self._mine_W, self._again_W = first[:WORDS], second[:WORDS]
        self.found_TW = torch.zeros(peers.ranks, WORDS, dtype=torch.int32, device=peers.device)

    def add(self, hidden_RH: Tensor, rows: RowTable, outcome_EF: Tensor) -> None:
        """Add a step to the checksum, as part of its pass, and gather the checksums of all
        ranks.
        """
        total = self._mine_W.view(torch.int64)
        add_states(hidden_RH, rows, outcome_EF, self.peers.missed, total)
        self.peers.gather(self._mine_W, self.found_TW)

    def gather_again(self) -> None:
        """Gather the checksums again, after exchanges that follow the step's pass."""
        self._again_W.copy_(self._mine_W)
        self._again_W[2:].copy_(self.peers.missed)
        self.peers.gather(self._again_W, self.found_TW)

    def begin(self) -> None:
        """Set all checksums to zero, while no rank exchanges."""
        self._mine_W.zero_()
        self._again_W.zero_()
        self.peers.reset()

    def failure(self, missed_T: Sequence[Sequence[int]]) -> str:
        """Return the message of `RankPeers.failure`."""
        return self.peers.failure(missed_T)


def differing(words: Sequence[int]) -> list[int]:
    """Return the ranks whose checksum differs from rank 0's."""
    sums = list(zip(words[::WORDS], words[1::WORDS], strict=True))
    return [rank for rank, each in enumerate(sums) if each != sums[0]]


def missed(words: Sequence[int]) -> list[tuple[int, int]]:
    """Return `RankPeers.missed` of each rank."""
    return list(zip(words[2::WORDS], words[3::WORDS], strict=True))
