"""The exchange of GPUs that cannot map each other's memory: a library gathers the bytes of all
ranks, and the kernels for one rank add them, with the same bits.

Nothing signals here: a gather ends when all ranks have called it. Ranks call the same gathers in
the same order, in captured graphs too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tlt_kernels.gpu.exchange import ROOMS
from tlt_kernels.gpu.norm import add_rms_norm_into
from tlt_kernels.gpu.quantise import Rows
from tlt_server.engine.exchange.gloo import GlooExchange


class GatherLibrary(Protocol):
    """The ranks as connected by a library."""

    def gather(self, mine_X: Tensor, out_X: Tensor) -> None:
        """Copy the elements of all ranks, in rank order, after the work queued on the stream."""

    def failure(self) -> str:
        """Return the reason for a failure, or an empty string. It waits for no rank."""

    def close(self) -> None:
        """Close it and abort open gathers."""


@dataclass
class GatheredPeers:
    """Implements `tlt_kernels.gpu.exchange.RankPeers`."""

    rank: int
    ranks: int
    room_YX: Tensor  # float32, `ROOMS` rooms
    library: GatherLibrary
    muted: bool = field(default=False, init=False)
    missed: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.missed = torch.zeros(2, dtype=torch.int32, device=self.device)

    @property
    def device(self) -> torch.device:
        return self.room_YX.device

    def room(self, turn: int) -> Tensor:
        return self.room_YX[turn % ROOMS]

    def parts(self, rows: int) -> int:
        return 1  # all of them are gathered

    def add_rms_norm(
        self,
        part_PRH: Tensor,
        residual_RH: Tensor,
        weight_H: Tensor | None,
        eps: float,
        *,
        bias_H: Tensor | None = None,
        out_RH: Rows,
    ) -> Rows:
        part_TPRH = part_PRH.new_empty(self.ranks, *part_PRH.shape)
        self._gather(part_PRH, part_TPRH)
        part_LRH = part_TPRH.flatten(0, 1)
        return add_rms_norm_into(out_RH, part_LRH, residual_RH, weight_H, eps, bias_H=bias_H)

    def gather(self, mine_X: Tensor, out_TX: Tensor) -> Tensor:
        self._gather(mine_X, out_TX)
        return out_TX

    def _gather(self, mine_X: Tensor, out_TX: Tensor) -> None:
        if self.muted and not (mine_X.is_cuda and torch.cuda.is_current_stream_capturing()):
            return  # the others may not come; a capture waits for none
        if mine_X.numel():
            words_X, out_X = mine_X.view(torch.int32).view(-1), out_TX.view(torch.int32).view(-1)
            self.library.gather(words_X, out_X)

    def failure(self, missed_T: Sequence[Sequence[int]] = ()) -> str:
        return self.library.failure()

    def mute(self) -> None:
        self.muted = True

    def reset(self) -> None:
        self.muted = False


def rooms(floats: int, device: torch.device) -> Tensor:
    """Return memory for at least `floats` elements per rank, each part at a whole kilobyte."""
    return torch.zeros(ROOMS, -(-floats // 256) * 256, dtype=torch.float32, device=device)


class GlooGathering:
    """Stands in for NCCL when Triton's interpreter stands in for a GPU."""

    def __init__(self, exchange: GlooExchange) -> None:
        self._exchange = exchange

    def gather(self, mine_X: Tensor, out_X: Tensor) -> None:
        torch.cat(self._exchange.gathered(mine_X), out=out_X)

    def failure(self) -> str:
        return ""

    def close(self) -> None: ...
