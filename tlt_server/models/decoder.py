"""The decoder that every family shares: embedding, pre-norm layers, final norm, LM head, all in
float32 on the CPU.

Built empty by `loader.load_target`, filled through `parameters()`, called by the engine's runner
once per step. Every operation is row-wise with a fixed order of summation, so in strict numerics a
row's bits depend on its prefix only.

Legend: R rows, H hidden, F feature width, V vocabulary, S slots, K KV heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tlt_kernels.cpu.elementwise import add_rms_norm, rms_norm
from tlt_server.attention import BACKENDS, Attention
from tlt_server.attention.rows import KVCache, Rows
from tlt_server.errors import ModelError
from tlt_server.models import Forward
from tlt_server.models.adapted import AdaptedLayer
from tlt_server.models.config import ModelConfig
from tlt_server.models.layers import GatedMlp, SelfAttention
from tlt_server.models.names import target_parameters
from tlt_server.models.numerics import Numerics, WeightSlice
from tlt_server.models.rope import RotaryTable, rotary_table
from tlt_server.models.shards import Stored, kv_heads, pieces_of, vocabulary
from tlt_server.models.split import WHOLE, Split


class DecoderLayer:
    def __init__(
        self,
        config: ModelConfig,
        table: RotaryTable,
        attention: Attention,
        numerics: Numerics,
        split: Split,
        index: int,
    ) -> None:
        in_fp8 = config.quantised_maps(index)
        self.input_norm_H = torch.ones(config.hidden_size)
        self.post_attention_norm_H = torch.ones(config.hidden_size)
        self.self_attention = SelfAttention(
            config.hidden_size,
            config.hidden_size,
            config.heads // split.of,
            kv_heads(config, split),
            config.head_dim,
            shape=config.layer_shape,
            norm_eps=config.norm_eps,
            table=table,
            attention=attention,
            numerics=numerics,
            split=split,
            in_fp8=in_fp8,
        )
        self.mlp = GatedMlp(
            config.hidden_size,
            config.intermediate_size // split.of,
            shape=config.layer_shape,
            numerics=numerics,
            split=split,
            in_fp8=in_fp8,
        )


class Decoder:
    def __init__(
        self,
        config: ModelConfig,
        *,
        numerics: Numerics,
        attention: str = "cpu",
        page_size: int = 16,
        feature_layers: tuple[int, ...] = (),
        split: Split = WHOLE,
    ) -> None:
        """`feature_layers`: layers whose inputs `forward` returns (Hugging Face
        `hidden_states[i]`), 0 <= i < layers, or i = layers for the hidden state after the final
        norm.
        """
        wrong = [layer for layer in feature_layers if not 0 <= layer <= config.layers]
        if wrong:
            raise ModelError(
                f"feature layers {wrong} do not exist: the target has 0 to {config.layers}; "
                "use a drafter made for it"
            )
        self.config, self.numerics, self.split = config, numerics, split
        self.page_size, self.attention_name = page_size, attention
        self.feature_layers = feature_layers
        self.kv_layers, self.kv_heads = config.layers, kv_heads(config, split)
        self.head_dim, self.vocab_size = config.head_dim, config.vocab_size
        self.hidden_size, self.max_position = config.hidden_size, config.max_position
        self.eos_token_ids = config.eos_token_ids
        self.feature_width = len(feature_layers) * config.hidden_size
        self.embedding_VH = torch.zeros(config.vocab_size, config.hidden_size)
        # The other ranks' shards, in the process that loads and pushes for all of them.
        self.peers: tuple[Decoder, ...] = ()
        ranges = [vocabulary(config, each) for each in split.all]
        self._widths = [stop - start for start, stop in ranges]
        # A tied head reads the embedding's own storage: half the memory, and a weight push writes
        # one tensor.
        self.head_HV = (
            self.embedding_VH[slice(*ranges[split.rank])].t()
            if config.tied_embeddings
            else torch.zeros(config.hidden_size, self._widths[split.rank])
        )
        self.final_norm_H = torch.ones(config.hidden_size)
        backend = BACKENDS.resolve(attention)(
            page_size=page_size,
            heads=config.heads // split.of,
            kv_heads=self.kv_heads,
            head_dim=config.head_dim,
        )
        table = rotary_table(config.rope, config.head_dim, config.max_position)
        self.layers = [
            DecoderLayer(config, table, backend, numerics, split, index)
            for index in range(config.layers)
        ]

    def blank(self) -> Decoder:
        """Return the same model with its own empty storage."""
        return self.split.build(
            lambda split: Decoder(
                self.config,
                numerics=self.numerics,
                attention=self.attention_name,
                page_size=self.page_size,
                feature_layers=self.feature_layers,
                split=split,
            )
        )

    def forward(
        self, rows: Rows, cache: KVCache, adapted: Sequence[AdaptedLayer] | None = None
    ) -> Forward:
        """Extend by `rows`: writes their KV at `kv_slot_R` in every layer. Requires `position_R <
        max_position`. `adapted`: the adapters' additions to some rows, by layer.
        """
        eps, keys, values = self.config.norm_eps, cache.k.unbind(0), cache.v.unbind(0)
        residual_RH = self.embedding_VH.index_select(0, rows.token_R)
        inputs: dict[int, Tensor] = {}
        normed_RH = rms_norm(residual_RH, self.layers[0].input_norm_H, eps)
        for index, layer in enumerate(self.layers):
            if index in self.feature_layers:
                inputs[index] = residual_RH.clone()
            own = adapted[index] if adapted is not None else None
            attended_RH = layer.self_attention(
                normed_RH, keys[index], values[index], rows, adapted=own, rounds=cache.rounds
            )
            normed_RH = add_rms_norm(attended_RH, residual_RH, layer.post_attention_norm_H, eps)
            next_norm_H = (
                self.layers[index + 1].input_norm_H
                if index + 1 < len(self.layers)
                else self.final_norm_H
            )
            normed_RH = add_rms_norm(layer.mlp(normed_RH, own), residual_RH, next_norm_H, eps)
        inputs[len(self.layers)] = normed_RH
        features = [inputs[index] for index in self.feature_layers]
        return Forward(
            normed_RH,
            torch.cat(features, dim=1) if features else residual_RH.new_empty(len(rows), 0),
        )

    def logits(self, hidden_RH: Tensor, check: int = 0) -> Tensor:
        """Return logits [R, V] float32, from `Forward.hidden_RH` or any of its rows. `check`: see
        `RankExchange.join`.
        """
        own_RV = self.numerics.linear(hidden_RH, self.head_HV)
        return self.split.exchange.join(own_RV, self._widths, check)

    def make_cache(
        self,
        pages: int,
        page_size: int,
        scratch: int,
        *,
        hidden: bool = False,
        rounds: bool = False,
    ) -> KVCache:
        """`hidden`: also keep the last hidden state of every slot. `rounds`: KV to e4m3."""
        assert page_size == self.page_size, (
            f"built for pages of {self.page_size}, asked for {page_size}"
        )
        return KVCache(
            layers=self.kv_layers,
            pages=pages,
            page_size=page_size,
            scratch=scratch,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            features=self.feature_width,
            hidden=self.hidden_size if hidden else 0,
            rounds=rounds,
        )

    def parameters(self) -> Mapping[str, Stored]:
        """Return a view [out, in] of the live storage, including the shards of `peers`, for each
        Hugging Face name. A tied `lm_head.weight` is not listed.
        """
        shards = [model.own_parameters() for model in (self, *self.peers)]
        return pieces_of(shards, self.config, self.split.all)

    def own_parameters(self) -> dict[str, Any]:
        """Return this rank's slices."""
        return dict(target_parameters(self, self.head_HV.t()))

    def self_test(self, others: Iterable[tuple[Tensor, None]] = ()) -> None:
        """Check strict numerics on this model's matmuls, and on `others`; see
        `Numerics.self_test`.
        """
        weights, slices = self.tested()
        self.numerics.self_test([*weights, *others], slices)

    def tested(self) -> tuple[list[tuple[Tensor, Tensor | None]], list[WeightSlice]]:
        """Return one (weight_KN, bias_N) of each kind, and slices of wider weights."""
        attention, mlp, head_HV = self.layers[0].self_attention, self.layers[0].mlp, self.head_HV
        whole = [(p.weight_KX, p.bias_X) for p in (attention.qkv, mlp.gate_up)]
        summed = [
            (p.weight_KX, p.bias_X) if p.whole else (p.leaf_KX, None)
            for p in (attention.output, mlp.down)
        ]
        weights, ranks = [*whole, *summed, (head_HV, None)], self.split.of
        slices = [
            WeightSlice(each.weight_KX, list(each.parts.values()), ranks)
            for each in (attention.qkv, mlp.gate_up)
        ]
        slices.append(WeightSlice(head_HV, [head_HV.shape[1]], ranks))
        return weights, slices if ranks > 1 else []
