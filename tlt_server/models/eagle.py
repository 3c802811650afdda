"""Draft networks of EAGLE-3 (arXiv 2503.01840) and of EAGLE-1 and EAGLE-2 (arXiv 2401.15077,
2406.16858) in the published checkpoint layouts: one decoder layer over the target's features.

Slot p has (embedding of x_p, feature g_{p-1}); slot 0 is never used, so attention starts at
position 1. The layer's output h is directly the next drafted step's feature: `fuse` is only for the
target's features. Called by the `eagle` drafter. A network's class says which layers it reads, how
it joins features with the embedding, and which head it has; the rest is common.

Legend: R rows, H hidden, F feature width, X width of the layer's input, C draft vocabulary, V
target vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

from tlt_kernels.cpu.elementwise import add_rms_norm, rms_norm
from tlt_server.attention import BACKENDS
from tlt_server.attention.rows import KVCache, Rows
from tlt_server.models.config import LayerShape
from tlt_server.models.decoder import Decoder
from tlt_server.models.draft_checkpoint import (
    Described,
    describe,
    fill_drafter,
    refuse_own_embedding,
    target_ids,
)
from tlt_server.models.layers import GatedMlp, Projection, SelfAttention
from tlt_server.models.rope import rotary_table
from tlt_server.models.shards import Stored, with_originals
from tlt_server.settings.server import QuantizationName


class LayerInput(NamedTuple):
    """The embeddings and features of rows, in the form of the layer's input."""

    input_RX: Tensor  # for its attention
    residual_RH: Tensor  # at the start of the residual stream; not to be written to


class EagleNetwork:
    """Layers and storage of one drafter. It shares the target's numerics and page size and, if it
    has none, the target's embedding.
    """

    part = None  # whole: ranks of a CPU share no drafter
    kv_layers = 1

    def __init__(self, described: Described, target: Decoder) -> None:
        config, numerics = described.config, target.numerics
        hidden = config.hidden_size
        self.described, self.config, self.numerics = described, config, numerics
        self.originals = dict[str, Tensor]()  # matrices before FP8
        self.page_size, self.vocab_size = target.page_size, target.vocab_size
        self.draft_vocab_size, self.max_position = described.draft_vocab_size, config.max_position
        self.own_embedding = described.own_embedding
        architecture = described.architecture
        self.own_head, self.vocabulary_map = architecture.own_head, architecture.vocabulary_map
        self.embedding_VH = (
            torch.zeros(target.vocab_size, hidden) if self.own_embedding else target.embedding_VH
        )
        self.post_attention_norm_H = torch.ones(hidden)
        shape = LayerShape(qkv_bias=config.attention_bias, mlp_bias=config.mlp_bias)
        backend = BACKENDS.resolve(target.attention_name)(
            page_size=target.page_size,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
        )
        self.self_attention = SelfAttention(
            architecture.inputs * hidden,
            hidden,
            config.heads,
            config.kv_heads,
            config.head_dim,
            shape=shape,
            norm_eps=config.norm_eps,
            table=rotary_table(config.rope, config.head_dim, config.max_position),
            attention=backend,
            numerics=numerics,
            in_fp8=config.quantised_maps(0),
        )
        self.mlp = GatedMlp(
            hidden,
            config.intermediate_size,
            shape=shape,
            numerics=numerics,
            in_fp8=config.quantised_maps(0),
        )
        # int64 [C], draft id -> target id. Not on the device `meta`: for it, torch imports sympy.
        self.target_ids = torch.arange(described.draft_vocab_size, device="cpu")

    @classmethod
    def load(cls, directory: str | Path, target: Decoder) -> Self:
        """Load a drafter. Raises `ModelError`. The target must have been built with this drafter's
        `feature_layers`.
        """
        directory = Path(directory)
        drafter = cls(describe(directory, target), target)
        fill_drafter(drafter, directory)
        return drafter

    def blank(self, target: Decoder, *, own_embedding: bool) -> Self:
        """Return the same network with its own empty storage. The vocabulary map stays until
        another is set.
        """
        network = type(self)(self.described._replace(own_embedding=own_embedding), target)
        network.target_ids = self.target_ids
        return network

    @property
    def quantization(self) -> QuantizationName:
        return "none" if self.config.quantization is None else "fp8"

    def follow(self, target: Decoder) -> None:
        """Read this target's embedding from now on, unless the drafter has its own."""
        if not self.own_embedding:
            self.embedding_VH = target.embedding_VH

    def set_vocabulary(self, d2t_C: Tensor, t2d_V: Tensor, path: Path) -> None:
        """Set the map from draft ids to target ids by a checkpoint's two tensors, which must agree.
        `path`: their name in errors.
        """
        self.target_ids = target_ids(d2t_C, t2d_V, self.draft_vocab_size, self.vocab_size, path)

    def fuse(self, features_RF: Tensor) -> Tensor:
        """Return the drafter's g, [R, H], from the target's features at position p - 1."""
        raise NotImplementedError

    def join(self, rows: Rows, g_RH: Tensor) -> LayerInput:
        raise NotImplementedError

    def logits(self, h_RH: Tensor) -> Tensor:
        """Return logits [R, C] over the draft vocabulary, which predict x_{p+1}."""
        raise NotImplementedError

    def parameters(self) -> dict[str, Stored]:
        """Return views [out, in] of the live storage by published names, without d2t and t2d."""
        views = dict(self.described.architecture.parameters(self))
        return with_originals(views, torch.float32, self.originals)

    def forward(self, rows: Rows, g_RH: Tensor, cache: KVCache) -> Tensor:
        """Write the KV of rows (x_p, g_{p-1}) at positions p >= 1; return h_RH, the feature of
        p.
        """
        joined = self.join(rows, g_RH)
        attended_RH = self.self_attention(joined.input_RX, cache.k[0], cache.v[0], rows, first=1)
        residual_RH = joined.residual_RH.clone()
        normed_RH = add_rms_norm(
            attended_RH, residual_RH, self.post_attention_norm_H, self.config.norm_eps
        )
        return residual_RH.add_(self.mlp(normed_RH))

    def store_only(self, rows: Rows, g_RH: Tensor, cache: KVCache) -> None:
        """Write only the rows' KV: catch-up over committed tokens."""
        self.self_attention.store(self.join(rows, g_RH).input_RX, cache.k[0], cache.v[0], rows)

    def make_cache(self, pages: int, page_size: int, scratch: int) -> KVCache:
        assert page_size == self.page_size, (
            f"built for pages of {self.page_size}, asked for {page_size}"
        )
        return KVCache(
            layers=self.kv_layers,
            pages=pages,
            page_size=page_size,
            scratch=scratch,
            kv_heads=self.config.kv_heads,
            head_dim=self.config.head_dim,
        )


class Eagle3(EagleNetwork):
    """The network of EAGLE-3: three layers' inputs through `fc`; separate norms of embedding and
    feature; its own head over the draft vocabulary.
    """

    def __init__(self, described: Described, target: Decoder) -> None:
        hidden = described.config.hidden_size
        super().__init__(described, target)
        self.fusion = Projection(
            target.feature_width, {"fc": hidden}, bias=False, numerics=self.numerics
        )
        self.embedding_norm_H, self.feature_norm_H = torch.ones(hidden), torch.ones(hidden)
        self.final_norm_H = torch.ones(hidden)
        self.head = Projection(
            hidden,
            {"lm_head": self.draft_vocab_size},
            bias=False,
            numerics=self.numerics,
            in_fp8=self.config.quantization is not None,
        )

    def fuse(self, features_RF: Tensor) -> Tensor:
        return self.fusion(features_RF)

    def join(self, rows: Rows, g_RH: Tensor) -> LayerInput:
        eps = self.config.norm_eps
        embedded_RH = self.embedding_VH.index_select(0, rows.token_R)
        normed_RH = rms_norm(g_RH, self.feature_norm_H, eps)
        input_RX = torch.cat([rms_norm(embedded_RH, self.embedding_norm_H, eps), normed_RH], dim=1)
        return LayerInput(input_RX, normed_RH if self.described.norm_before_residual else g_RH)

    def logits(self, h_RH: Tensor) -> Tensor:
        return self.head(rms_norm(h_RH, self.final_norm_H, self.config.norm_eps))


class Eagle1(EagleNetwork):
    """The network of EAGLE-1 and EAGLE-2: the feature is the target's hidden state after its final
    norm; `fc` joins it with the embedding; the layer has no input norm; head and embedding are the
    target's. As in SafeAILab/EAGLE, `eagle/model/cnets1.py`.
    """

    def __init__(self, described: Described, target: Decoder) -> None:
        hidden = described.config.hidden_size
        super().__init__(described, target)
        self.joint = Projection(
            2 * hidden, {"fc": hidden}, bias=described.join_bias, numerics=self.numerics
        )
        self.head_HV = target.head_HV

    def blank(self, target: Decoder, *, own_embedding: bool) -> Self:
        refuse_own_embedding(own_embedding)
        return super().blank(target, own_embedding=False)

    def follow(self, target: Decoder) -> None:
        super().follow(target)
        self.head_HV = target.head_HV

    def fuse(self, features_RF: Tensor) -> Tensor:
        return features_RF

    def join(self, rows: Rows, g_RH: Tensor) -> LayerInput:
        embedded_RH = self.embedding_VH.index_select(0, rows.token_R)
        x_RH = self.joint(torch.cat([embedded_RH, g_RH], dim=1))
        return LayerInput(x_RH, x_RH)

    def logits(self, h_RH: Tensor) -> Tensor:
        return self.numerics.linear(h_RH, self.head_HV)
