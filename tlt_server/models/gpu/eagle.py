"""The draft networks of EAGLE-3, EAGLE-1 and EAGLE-2 on a GPU; see `tlt_server.models.eagle` for
their arithmetic.

Slot p of its KV has (embedding of x_p, feature g_{p-1}): `store` writes it for every row that the
target extends, `forward` drafts. A network's class says which layers it reads, how it joins
features with the embedding, and which head it has; the rest is common.

Legend: R rows, H hidden, F feature width, P partial sums, X width of the layer's input, C draft
vocabulary, V target vocabulary, W children of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from tlt_kernels.gpu.children import children, children_shared
from tlt_kernels.gpu.norm import add, embed_beside, embed_norms
from tlt_kernels.gpu.quantise import Matrix, Quantised
from tlt_kernels.gpu.tensors import BatchSlots, RowTable
from tlt_server.attention.rows import KVCache
from tlt_server.errors import ModelError
from tlt_server.models.config import LayerShape
from tlt_server.models.draft_checkpoint import Described, refuse_own_embedding, target_ids
from tlt_server.models.gpu.decoder import GpuDecoder, device_table
from tlt_server.models.gpu.draft_part import drafter_part
from tlt_server.models.gpu.layers import (
    Attend,
    GpuGatedMlp,
    GpuProjection,
    GpuSelfAttention,
    RowTensors,
    plain,
)
from tlt_server.models.gpu.limits import check_shape
from tlt_server.models.gpu.matmuls import WHOLE
from tlt_server.models.gpu.sums import ATTENTION, MLP, OWN_SUMS
from tlt_server.models.quantised import QuantisedTensor
from tlt_server.models.shards import Stored, pieces_of, tensors_of, with_originals
from tlt_server.models.split import Split
from tlt_server.settings.server import QuantizationName


def spread_drafter(target: GpuDecoder, make: Callable[[GpuDecoder], Any]) -> Any:
    """Return the target's drafter, built by `make`, with a copy for each rank."""
    return target.split.build(lambda split: make(target.of(split.rank)), target)


class GpuEagleNetwork:
    """Layers and storage of one drafter, placed like its target. If it has no embedding, it shares
    the target's.
    """

    kv_layers = 1

    def __init__(self, described: Described, target: GpuDecoder) -> None:
        config, placement = described.config, target.placement
        hidden = config.hidden_size
        shape = LayerShape(qkv_bias=config.attention_bias, mlp_bias=config.mlp_bias)
        check_shape(config, shape, "the drafter")
        self.described, self.config, self.placement = described, config, placement
        self.originals = dict[str, Tensor]()  # matrices before FP8
        part = self.part = drafter_part(
            config,
            described.draft_vocab_size,
            target.split,
            placement.drafter_parallel,
            placement.dtype.itemsize,
        )
        own, quantised = part.layer, config.quantised_maps(0)
        self.sums = placement.sums if part.split.of > 1 else OWN_SUMS
        self._sharing = placement.sums.peers if part.head_split.of > 1 else None
        of_rank = replace(placement, matmuls=placement.matmuls.of_rank(part.split))
        self.draft_vocab_size, self.own_embedding = (
            described.draft_vocab_size,
            described.own_embedding,
        )
        architecture = described.architecture
        self.own_head, self.vocabulary_map = architecture.own_head, architecture.vocabulary_map
        self.vocab_size = target.vocab_size
        # The same network of the other ranks, in the process that loads and pushes for all.
        self.split: Split = WHOLE
        self.peers: tuple[GpuEagleNetwork, ...] = ()
        self.embedding_VH = (
            placement.empty(target.vocab_size, hidden)
            if self.own_embedding
            else target.embedding_VH
        )
        self.post_attention_norm_H = placement.empty(hidden)
        self.self_attention = GpuSelfAttention(
            architecture.inputs * hidden,
            hidden,
            own.heads,
            own.kv_heads,
            own.head_dim,
            shape=shape,
            norm_eps=config.norm_eps,
            table=device_table(config, placement),
            placement=of_rank,
            quantised=quantised,
        )
        self.mlp = GpuGatedMlp(
            hidden, own.intermediate_size, shape=shape, placement=of_rank, quantised=quantised
        )
        count = self.draft_vocab_size
        # draft id -> target id
        self.target_ids_C = torch.empty(count, dtype=torch.int32, device=placement.device)
        self.target_ids_C.copy_(torch.arange(count, dtype=torch.int32))

    def follow(self, target: GpuDecoder) -> None:
        """Read missing parts of this network from this target from now on, on all ranks."""
        if not self.own_embedding:
            self.embedding_VH = target.embedding_VH
        for network, of in zip(self.peers, target.peers, strict=True):
            network.follow(of)

    @property
    def target_ids(self) -> Tensor:
        """Return int64 [C] on the host."""
        return self.target_ids_C.long().cpu()

    def set_vocabulary(self, d2t_C: Tensor, t2d_V: Tensor, path: Path) -> None:
        """Set the map from draft ids to target ids by a checkpoint's two tensors, which must agree.
        `path`: their name in errors.
        """
        found = target_ids(d2t_C, t2d_V, self.draft_vocab_size, self.vocab_size, path)
        for network in (self, *self.peers):
            network.target_ids_C.copy_(found)

    def blank(self, target: GpuDecoder, *, own_embedding: bool) -> Self:
        """Return the same network with its own empty storage. The vocabulary map stays until
        another is set.

        `ModelError` if only one of the two has its own embedding: their storage could not be
        swapped.
        """
        if own_embedding != self.own_embedding:
            pushed, resident = ("brings", "has none") if own_embedding else ("lacks", "has one")
            remedy = "leave it out of the push" if own_embedding else "push it, too"
            raise ModelError(
                f"the drafter {pushed} 'embed_tokens.weight', the active one {resident}, and a "
                f"running GPU engine cannot change that; {remedy}, or restart the server with "
                "--drafter naming the other"
            )
        made = spread_drafter(target, lambda of: type(self)(self.described, of))
        for network in (made, *made.peers):
            network.target_ids_C.copy_(self.target_ids_C)
        return made

    def fuse(self, features_RF: Tensor) -> Tensor:
        """Return the next position's g, [R, H], from the target's features."""
        raise NotImplementedError

    def join(self, rows: RowTensors, g_RH: Tensor) -> Tensor | Quantised:
        """Return the layer's input [R, X], and write the start of the residual stream to `g_RH`,
        float32.
        """
        raise NotImplementedError

    def hidden(self, part_PRH: Tensor, residual_RH: Tensor) -> Tensor | Quantised:
        """Add the last partial sums to the residual, in place; return the input of the head."""
        raise NotImplementedError

    @property
    def quantization(self) -> QuantizationName:
        return "none" if self.config.quantization is None else "fp8"

    @property
    def head_matrix(self) -> Matrix:
        raise NotImplementedError

    def parameters(self) -> Mapping[str, Stored]:
        """Return views [out, in] of the live storage, including those of `peers`, by published
        names; `target_ids_C` is `d2t`.
        """
        shards = [network.own_parameters() for network in (self, *self.peers)]
        splits = [network.part.split for network in (self, *self.peers)]
        pieces = pieces_of(shards, self.part.head, splits)
        return with_originals(pieces, self.placement.dtype, self.originals)

    def own_parameters(self) -> dict[str, Tensor | QuantisedTensor]:
        """Return this rank's slices."""
        return dict(self.described.architecture.parameters(self))

    def forward(self, rows: RowTensors, g_RH: Tensor, cache: KVCache, attend: Attend) -> Tensor:
        """Run rows (x_p, g_{p-1}) at positions p >= 1: write their KV and return the logits_RC of
        `part.tokens`. `g_RH`, float32, becomes the end of the residual stream, the feature for
        drafts after these rows.
        """
        input_RX, sums, eps = self.join(rows, g_RH), self.sums, self.config.norm_eps
        room = sums.room(ATTENTION, len(g_RH))
        part_PRH = self.self_attention(
            input_RX, cache.k[0], cache.v[0], rows, attend, first=1, room=room
        )
        x_RH = self.placement.rows(*g_RH.shape, quantised=self.mlp.gate_up.quantised)
        sums.add_rms_norm(part_PRH, g_RH, self.post_attention_norm_H, eps, x_RH)
        hidden_RH = self.hidden(self.mlp(x_RH, room=sums.room(MLP, len(g_RH))), g_RH)
        return self.placement.matmuls.linear(hidden_RH, self.head_matrix, out_dtype=torch.float32)

    def children(
        self, logits_RC: Tensor, rows: RowTable, batch_slots: BatchSlots, *, width: int, level: int
    ) -> tuple[Tensor, Tensor]:
        """Return the best children of rows over the draft tokens of all ranks: target ids [R, W]
        and scores, like `tlt_kernels.gpu.children`. logits_RC: from `forward`. `level`: of the
        tree, from 0.
        """
        own_ids_C, peers = self.target_ids_C[self.part.tokens], self._sharing
        if peers is None:
            return children(logits_RC, own_ids_C, rows, batch_slots, width=width)
        most = self.part.most_tokens
        return children_shared(
            peers, logits_RC, own_ids_C, most, rows, batch_slots, width=width, turn=level
        )

    def store(self, rows: RowTensors, g_RH: Tensor, cache: KVCache) -> None:
        """Write only the rows' KV."""
        self.self_attention.store(self.join(rows, g_RH), cache.k[0], cache.v[0], rows)

    def storage(self) -> list[Tensor]:
        """Return all tensors of a version, in a fixed order."""
        own = [each for stored in self.own_parameters().values() for each in tensors_of(stored)]
        return [*own, self.target_ids_C]


class GpuEagle3(GpuEagleNetwork):
    """See `models.eagle.Eagle3`."""

    def __init__(self, described: Described, target: GpuDecoder) -> None:
        super().__init__(described, target)
        hidden, placement = described.config.hidden_size, self.placement
        tokens = self.part.tokens
        self.fusion = GpuProjection(
            target.feature_width, {"fc": hidden}, bias=False, placement=placement
        )
        self.embedding_norm_H, self.feature_norm_H = (
            placement.empty(hidden),
            placement.empty(hidden),
        )
        self.final_norm_H = placement.empty(hidden)
        self.head = GpuProjection(
            hidden,
            {"lm_head": tokens.stop - tokens.start},
            bias=False,
            placement=placement,
            quantised=self.config.quantization is not None,
        )

    def fuse(self, features_RF: Tensor) -> Tensor:
        return self.fusion(features_RF)

    def join(self, rows: RowTensors, g_RH: Tensor) -> Tensor | Quantised:
        read = self.described.norm_before_residual  # from rows that are not quantised
        count, hidden = g_RH.shape
        quantised = self.self_attention.qkv.quantised and not read
        input_RX = embed_norms(
            rows.token_R,
            self.embedding_VH,
            self.embedding_norm_H,
            g_RH,
            self.feature_norm_H,
            self.config.norm_eps,
            self.placement.rows(count, 2 * hidden, quantised=quantised),
        )
        if read:
            g_RH.copy_(plain(input_RX)[:, hidden:])
        return input_RX

    def hidden(self, part_PRH: Tensor, residual_RH: Tensor) -> Tensor | Quantised:
        return self.sums.add_rms_norm(
            part_PRH,
            residual_RH,
            self.final_norm_H,
            self.config.norm_eps,
            self.placement.rows(*residual_RH.shape, quantised=self.head.quantised),
        )

    @property
    def head_matrix(self) -> Matrix:
        return self.head.weight


class GpuEagle1(GpuEagleNetwork):
    """See `models.eagle.Eagle1`. Head and embedding are read from the target's storage."""

    def __init__(self, described: Described, target: GpuDecoder) -> None:
        super().__init__(described, target)
        hidden = described.config.hidden_size
        self.joint = GpuProjection(
            2 * hidden, {"fc": hidden}, bias=described.join_bias, placement=self.placement
        )
        self.head = target.head

    def follow(self, target: GpuDecoder) -> None:
        super().follow(target)
        self.head = target.head

    def blank(self, target: GpuDecoder, *, own_embedding: bool) -> Self:
        refuse_own_embedding(own_embedding)
        return super().blank(target, own_embedding=False)

    def fuse(self, features_RF: Tensor) -> Tensor:
        return features_RF

    def join(self, rows: RowTensors, g_RH: Tensor) -> Tensor:
        both_RX = embed_beside(rows.token_R, self.embedding_VH, g_RH)
        self.joint(both_RX, out_dtype=g_RH.dtype, out_RX=g_RH)
        return g_RH.to(self.placement.dtype)

    def hidden(self, part_PRH: Tensor, residual_RH: Tensor) -> Tensor:
        return add(part_PRH, residual_RH, self.placement.dtype)

    @property
    def head_matrix(self) -> Matrix:
        return Matrix(self.head.weight_WH)
