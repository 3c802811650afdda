"""The sums of a target's row-parallel matmuls, with residual and norm: of this GPU's partial sums,
or of those of all ranks.

A layer has two, one after attention and one after the MLP. They alternate between two rooms of a
rank's window, so a pass, which has an even number of them, may follow any other. A draft head's
exchange between two layers uses the end of a room, which no partial sum reaches.

Legend: P partial sums, R rows, H hidden.
"""

from __future__ import annotations

from torch import Tensor

from tlt_kernels.gpu.exchange import RankPeers
from tlt_kernels.gpu.gemm_tiles import PARTS
from tlt_kernels.gpu.norm import add_rms_norm_into
from tlt_kernels.gpu.quantise import Rows
from tlt_server.models.gpu.matmuls import Room

ATTENTION, MLP = 0, 1  # turns


class LayerSums:
    """The sums of one rank, which adds its own partial sums."""

    peers: RankPeers | None = None  # the ranks whose partial sums are added; None with one rank

    def room(self, turn: int, rows: int) -> Room | None:
        """Return where this turn's partial sums are to be written; None: anywhere."""
        return None

    def add_rms_norm(
        self, part_PRH: Tensor, residual_RH: Tensor, weight_H: Tensor, eps: float, out_RH: Rows
    ) -> Rows:
        """Add the sum of the partial sums to the residual, in place; write and return its norm."""
        return add_rms_norm_into(out_RH, part_PRH, residual_RH, weight_H, eps)


class RankSums(LayerSums):
    peers: RankPeers

    def __init__(self, peers: RankPeers) -> None:
        self.peers = peers

    def room(self, turn: int, rows: int) -> Room:
        return Room(self.peers.room(turn), self.peers.parts(rows))

    def add_rms_norm(
        self, part_PRH: Tensor, residual_RH: Tensor, weight_H: Tensor, eps: float, out_RH: Rows
    ) -> Rows:
        return self.peers.add_rms_norm(part_PRH, residual_RH, weight_H, eps, out_RH=out_RH)


OWN_SUMS = LayerSums()


def room_floats(leaves: int, rows: int, hidden: int) -> int:
    """Return the largest number of elements of the partial sums of a rank's `leaves`."""
    return min(leaves, max(PARTS, leaves // 2)) * rows * hidden
