"""The LM head of several ranks: each has the rows of its blocks of tokens and computes their
logits.

If those suffice, each rank samples in its blocks and merges all ranks' results, with the bits of
one rank that has all blocks. If a step needs all logits (filters, edits, structures, reports),
every rank gathers them.

Legend: S sampled rows, N rows per gathering, H hidden, V vocabulary, W tokens of this rank, T
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_kernels.gpu.agreement import SUM_FLOATS
from tlt_kernels.gpu.exchange import RankPeers
from tlt_kernels.gpu.sampling import BLOCK, blocks_of_rank, sample_shared
from tlt_kernels.gpu.tensors import BatchSlots, RowTable, Samples
from tlt_server.models.gpu.decoder import GpuDecoder

# A rank's tokens are gathered in parts, one through each room: like a pass, an even number.
PARTS = 2
GATHERED = 1 << 24  # logits that are gathered at once, at most: 64 MiB


@dataclass(frozen=True)
class SharedHead:
    peers: RankPeers

    def sample(
        self,
        model: GpuDecoder,
        hidden_SH: Tensor,
        logits_SV: Tensor,
        row_S: Tensor,
        rows: RowTable,
        batch_slots: BatchSlots,
    ) -> Samples:
        """Return the samples. logits_SV: memory that is overwritten."""
        logits_SW = logits_SV.view(-1)[: len(hidden_SH) * len(model.head_WH)]
        logits_SW = model.logits(hidden_SH, logits_SW.view(len(hidden_SH), len(model.head_WH)))
        return sample_shared(self.peers, logits_SW, model.vocab_size, row_S, rows, batch_slots)

    def logits(self, model: GpuDecoder, hidden_SH: Tensor, logits_SV: Tensor) -> Tensor:
        """Compute all logits into logits_SV; every rank calls this together."""
        peers, vocabulary = self.peers, model.vocab_size
        own = blocks_of_rank(vocabulary, peers.ranks) * BLOCK
        part = own // PARTS
        room = len(peers.room(0)) - SUM_FLOATS
        assert room >= part, f"{part} logits, and a room of {room}"
        most = min(len(hidden_SH), room // part, max(1, GATHERED // (peers.ranks * part)))
        found_TX = hidden_SH.new_empty(peers.ranks, most * part, dtype=torch.float32)
        for hidden_NH, logits_NV in zip(hidden_SH.split(most), logits_SV.split(most), strict=True):
            count = len(hidden_NH)
            for turn in range(PARTS):
                tokens = slice(turn * part, (turn + 1) * part)
                size = len(model.head_WH[tokens])
                room_X = peers.room(turn)[: count * part]
                if size:
                    model.logits(hidden_NH, room_X[: count * size].view(count, size), tokens)
                peers.gather(room_X, found_TX.view(-1)[: peers.ranks * count * part])
                for rank, mine_X in enumerate(found_TX.view(-1).split(count * part)[: peers.ranks]):
                    start = rank * own + turn * part
                    end = min(start + part, vocabulary)
                    if start < end:
                        width = end - start
                        logits_NV[:, start:end] = mine_X[: count * width].view(count, width)
        return logits_SV
