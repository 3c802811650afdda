"""The EAGLE-3 draft network on a GPU; see `tlt_server.models.eagle` for the layout and its
arithmetic.

Slot p of its KV holds (embedding of x_p, hint g_{p-1}): `store` keeps it for every row that the
target extends, `forward` drafts.

Legend: R rows, H hidden, F = 3H feature width, C draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tlt_kernels.gpu.norm import add_rms_norm, embed_norms
from tlt_server.attention.rows import KVCache
from tlt_server.errors import ModelError
from tlt_server.models.config import ModelConfig
from tlt_server.models.eagle import target_ids
from tlt_server.models.gpu.decoder import GpuDecoder, device_table
from tlt_server.models.gpu.layers import (
    Attend,
    GpuGatedMlp,
    GpuProjection,
    GpuSelfAttention,
    RowTensors,
)
from tlt_server.models.gpu.limits import check_shape
from tlt_server.models.layers import LayerShape
from tlt_server.models.names import drafter_parameters


class GpuEagle3:
    """Layers and storage of one drafter, placed as its target is and sharing, where it has none,
    the target's embedding.
    """

    def __init__(
        self, config: ModelConfig, draft_vocab_size: int, target: GpuDecoder, *, own_embedding: bool
    ) -> None:
        placement, hidden = target.placement, config.hidden_size
        shape = LayerShape(qkv_bias=config.attention_bias, mlp_bias=config.mlp_bias)
        check_shape(config, shape, "the drafter")
        self.config, self.placement, self.draft_vocab_size, self.own_embedding = (
            config,
            placement,
            draft_vocab_size,
            own_embedding,
        )
        self.vocab_size = target.vocab_size
        self.embedding_VH = (
            placement.empty(target.vocab_size, hidden) if own_embedding else target.embedding_VH
        )
        self.fusion = GpuProjection(
            target.feature_width, {"fc": hidden}, bias=False, placement=placement
        )
        self.embedding_norm_H, self.feature_norm_H = (
            placement.empty(hidden),
            placement.empty(hidden),
        )
        self.post_attention_norm_H, self.final_norm_H = (
            placement.empty(hidden),
            placement.empty(hidden),
        )
        self.self_attention = GpuSelfAttention(
            2 * hidden,
            hidden,
            config.heads,
            config.kv_heads,
            config.head_dim,
            shape=shape,
            norm_eps=config.norm_eps,
            table=device_table(config, placement),
            placement=placement,
        )
        self.mlp = GpuGatedMlp(
            hidden, config.intermediate_size, bias=config.mlp_bias, placement=placement
        )
        self.head = GpuProjection(
            hidden, {"lm_head": draft_vocab_size}, bias=False, placement=placement
        )
        self.target_ids_C = torch.arange(
            draft_vocab_size, dtype=torch.int32, device=placement.device
        )  # draft id -> target id

    @property
    def target_ids(self) -> Tensor:
        """int64 [C] on the host."""
        return self.target_ids_C.long().cpu()

    def set_vocabulary(self, d2t_C: Tensor, t2d_V: Tensor, path: Path) -> None:
        """Map draft ids to target ids as a checkpoint's two tensors say; they must agree. `path`
        names them in errors.
        """
        self.target_ids_C.copy_(
            target_ids(d2t_C, t2d_V, self.draft_vocab_size, self.vocab_size, path)
        )

    def blank(self, target: GpuDecoder, *, own_embedding: bool) -> GpuEagle3:
        """The same network with storage of its own, to be filled with other weights; the vocabulary
        map is kept until another is set.

        `ModelError` where one of the two has an embedding of its own and the other has not: their
        storage could not be exchanged.
        """
        if own_embedding != self.own_embedding:
            pushed, resident = ("brings", "has none") if own_embedding else ("lacks", "has one")
            remedy = "leave it out of the push" if own_embedding else "push it, too"
            raise ModelError(
                f"the drafter {pushed} 'embed_tokens.weight', the one in use {resident}, and a "
                "running GPU engine cannot "
                f"change that; {remedy}, or restart the server with --drafter naming the other"
            )
        network = GpuEagle3(self.config, self.draft_vocab_size, target, own_embedding=own_embedding)
        network.target_ids_C.copy_(self.target_ids_C)
        return network

    def fuse(self, features_RF: Tensor) -> Tensor:
        """The target's features of a position as the hint of the next: [R, H]."""
        return self.placement.matmuls.linear(features_RF, self.fusion.weight_XK)

    def forward(self, rows: RowTensors, g_RH: Tensor, cache: KVCache, attend: Attend) -> Tensor:
        """Rows (x_p, g_{p-1}) at positions p >= 1: writes their KV and returns logits_RC. `g_RH`,
        float32, becomes the residual stream's end, the hint of what is drafted after the rows.
        """
        eps = self.config.norm_eps
        part_PRH = self.self_attention(
            self._normed(rows, g_RH), cache.k[0], cache.v[0], rows, attend, first=1
        )
        normed_RH = add_rms_norm(part_PRH, g_RH, self.post_attention_norm_H, eps)
        normed_RH = add_rms_norm(self.mlp(normed_RH), g_RH, self.final_norm_H, eps)
        return self.placement.matmuls.linear(
            normed_RH, self.head.weight_XK, out_dtype=torch.float32
        )

    def store(self, rows: RowTensors, g_RH: Tensor, cache: KVCache) -> None:
        """Write the rows' KV and compute nothing else."""
        self.self_attention.store(self._normed(rows, g_RH), cache.k[0], cache.v[0], rows)

    def _normed(self, rows: RowTensors, g_RH: Tensor) -> Tensor:
        return embed_norms(
            rows.token_R,
            self.embedding_VH,
            self.embedding_norm_H,
            g_RH,
            self.feature_norm_H,
            self.config.norm_eps,
        )

    def parameters(self) -> dict[str, Tensor]:
        """Map published names to views [out, in] of the live storage; `target_ids_C` is `d2t`."""
        return dict(drafter_parameters(self))

    def storage(self) -> list[Tensor]:
        """Everything that makes a version, in a fixed order."""
        return [*self.parameters().values(), self.target_ids_C]
