"""The LM head of several ranks: each computes the logits of its blocks of tokens, samples there,
and merges the results of all, to the bits of one rank that has all blocks.

The weights are whole on every rank: steps with filters, edits or structures, and reports, which
rank 0 makes alone, need all logits.

Legend: S sampled rows, H hidden, W tokens of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_kernels.gpu.exchange import RankPeers
from tlt_kernels.gpu.sampling import BLOCK, blocks_of_rank, sample_shared
from tlt_kernels.gpu.tensors import BatchSlots, RowTable, Samples
from tlt_server.models.gpu.decoder import GpuDecoder


@dataclass(frozen=True)
class SharedHead:
    peers: RankPeers

    def serves(self, vocabulary: int) -> bool:
        """Tell whether there is a block for every rank."""
        return blocks_of_rank(vocabulary, self.peers.ranks) > 0

    def sample(
        self,
        model: GpuDecoder,
        hidden_SH: Tensor,
        logits_SV: Tensor,
        row_S: Tensor,
        rows: RowTable,
        batch_slots: BatchSlots,
    ) -> Samples:
        """Return the samples; logits_SV: memory that is written over."""
        tokens = blocks_of_rank(model.vocab_size, self.peers.ranks) * BLOCK
        start = self.peers.rank * tokens
        head_WH = model.head_VH[start : min(start + tokens, model.vocab_size)]
        logits_SW = logits_SV.view(-1)[: len(hidden_SH) * len(head_WH)]
        logits_SW = logits_SW.view(len(hidden_SH), len(head_WH))
        model.placement.matmuls.linear(
            hidden_SH, head_WH, out_dtype=torch.float32, out_MN=logits_SW
        )
        return sample_shared(self.peers, logits_SW, model.vocab_size, row_S, rows, batch_slots)
