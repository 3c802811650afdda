"""The decoder of every family on a GPU: embedding, pre-norm layers, final norm, LM head.

Activations have the weights' dtype; the residual stream and the logits are fp32. In strict numerics
a row's bits depend only on its prefix. Filled through `parameters()`; CUDA graphs hold the
addresses, so new weights are swapped with the old in place (`models.gpu.swapping`).

Legend: R rows, H hidden, F feature width, V vocabulary, W tokens of this rank, S slots, K KV heads,
D head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tlt_kernels.gpu.norm import embed_rms_norm
from tlt_kernels.gpu.quantise import Matrix, Quantised
from tlt_server.attention.rows import KVCache
from tlt_server.errors import ModelError
from tlt_server.models import Forward
from tlt_server.models.config import ModelConfig, Rope
from tlt_server.models.gpu.adapted import GpuAdaptedLayer
from tlt_server.models.gpu.layers import (
    Attend,
    GpuGatedMlp,
    GpuProjection,
    GpuSelfAttention,
    RowTensors,
)
from tlt_server.models.gpu.limits import check_shape
from tlt_server.models.gpu.matmuls import WHOLE
from tlt_server.models.gpu.placement import Placement
from tlt_server.models.gpu.sums import ATTENTION, MLP, OWN_SUMS
from tlt_server.models.names import target_parameters
from tlt_server.models.quantised import QuantisedTensor
from tlt_server.models.quantization import LayerQuantization
from tlt_server.models.rope import RotaryTable, rotary_table
from tlt_server.models.shards import Stored, pieces_of, rank_config, vocabulary
from tlt_server.models.split import Split


class GpuDecoderLayer:
    def __init__(
        self,
        config: ModelConfig,
        table: RotaryTable,
        placement: Placement,
        quantised: LayerQuantization,
    ) -> None:
        shape = config.layer_shape
        self.input_norm_H, self.post_attention_norm_H = (
            placement.empty(config.hidden_size),
            placement.empty(config.hidden_size),
        )
        self.self_attention = GpuSelfAttention(
            config.hidden_size,
            config.hidden_size,
            config.heads,
            config.kv_heads,
            config.head_dim,
            shape=shape,
            norm_eps=config.norm_eps,
            table=table,
            placement=placement,
            quantised=quantised,
        )
        self.mlp = GpuGatedMlp(
            config.hidden_size,
            config.intermediate_size,
            shape=shape,
            placement=placement,
            quantised=quantised,
        )

    def storage(self) -> list[Tensor]:
        norms = [self.input_norm_H, self.post_attention_norm_H]
        return [*norms, *self.self_attention.storage(), *self.mlp.storage()]


class HeadRows(NamedTuple):
    """A rank's rows of the LM head. A view would keep memory that moves."""

    stored: Tensor
    rows: slice = slice(None)

    @property
    def weight_WH(self) -> Tensor:
        return self.stored[self.rows]


class GpuDecoder:
    def __init__(
        self,
        config: ModelConfig,
        *,
        placement: Placement,
        feature_layers: tuple[int, ...] = (),
        split: Split = WHOLE,
    ) -> None:
        """`feature_layers`: layers whose inputs `forward` returns (Hugging Face
        `hidden_states[i]`), 0 <= i < layers, or i = layers for the hidden state after the final
        norm. `split`: the rank's heads and parts of MLP and LM head; embedding and norms are whole
        on every rank.
        """
        wrong = [layer for layer in feature_layers if not 0 <= layer <= config.layers]
        if wrong:
            raise ModelError(
                f"feature layers {wrong} do not exist: the target has 0 to {config.layers}; "
                "use a drafter made for it"
            )
        check_shape(config, config.layer_shape, "the target")
        self.config, self.placement, self.feature_layers = config, placement, feature_layers
        self.split, self.own_config = split, rank_config(config, split)
        # The other ranks' shards, in the process that loads and pushes for all of them.
        self.peers: tuple[GpuDecoder, ...] = ()
        self.vocab_size, self.hidden_size, self.max_position = (
            config.vocab_size,
            config.hidden_size,
            config.max_position,
        )
        self.eos_token_ids = config.eos_token_ids
        self.feature_width = len(feature_layers) * config.hidden_size
        self.embedding_VH = placement.empty(config.vocab_size, config.hidden_size)
        whole = "lm_head" in split.whole
        first, last = (0, config.vocab_size) if whole else vocabulary(config, split)
        self.head = (
            HeadRows(self.embedding_VH, slice(first, last))
            if config.tied_embeddings
            else HeadRows(placement.empty(last - first, config.hidden_size))
        )
        self.final_norm_H = placement.empty(config.hidden_size)
        table = device_table(config, placement)
        of_rank = replace(placement, matmuls=placement.matmuls.of_rank(split))
        self.layers = [
            GpuDecoderLayer(self.own_config, table, of_rank, config.quantised_maps(index))
            for index in range(config.layers)
        ]

    @property
    def head_WH(self) -> Tensor:
        return self.head.weight_WH

    def blank(self) -> GpuDecoder:
        """Return the same model with its own empty storage."""
        return shards(self.config, self.placement, self.feature_layers, self.split)

    def of(self, rank: int) -> GpuDecoder:
        """Return the shard of a rank."""
        return self if rank == self.split.rank else self.peers[rank - 1]

    def forward(
        self,
        rows: RowTensors,
        cache: KVCache,
        attend: Attend,
        out_RH: Tensor | None = None,
        adapted: Sequence[GpuAdaptedLayer] | None = None,
    ) -> Forward:
        """Extend by `rows`: writes their KV at `kv_slot_R` in every layer. Hidden states, in
        `out_RH` if given, and features have the weights' dtype. `adapted`: the adapters' additions
        to some rows, by layer.
        """
        eps, keys, values = self.config.norm_eps, cache.k.unbind(0), cache.v.unbind(0)
        sums, count, layers = self.placement.sums, len(rows.token_R), self.layers
        scales = cache.scales()

        def input_of(projection: GpuProjection) -> Tensor | Quantised:
            # Adapters read unquantised rows, which the matmul then quantises itself.
            quantised = projection.quantised and adapted is None
            return self.placement.rows(count, self.hidden_size, quantised=quantised)

        x_RH = input_of(layers[0].self_attention.qkv)
        residual_RH = embed_rms_norm(
            rows.token_R, self.embedding_VH, layers[0].input_norm_H, eps, x_RH
        )
        features_RF = self.placement.empty(count, self.feature_width)
        hidden_RH = self.placement.empty(count, self.hidden_size) if out_RH is None else out_RH
        for index, layer in enumerate(layers):
            self._keep(index, residual_RH, features_RF)
            own = adapted[index] if adapted is not None else None
            part_PRH = layer.self_attention(
                x_RH,
                keys[index],
                values[index],
                rows,
                attend,
                scale_2KS=scales[index],
                adapted=own,
                room=sums.room(ATTENTION, count),
            )
            x_RH = input_of(layer.mlp.gate_up)
            sums.add_rms_norm(part_PRH, residual_RH, layer.post_attention_norm_H, eps, x_RH)
            part_PRH = layer.mlp(x_RH, own, sums.room(MLP, count))
            if index + 1 < len(layers):
                x_RH = input_of(layers[index + 1].self_attention.qkv)
                next_norm_H = layers[index + 1].input_norm_H
                sums.add_rms_norm(part_PRH, residual_RH, next_norm_H, eps, x_RH)
        sums.add_rms_norm(part_PRH, residual_RH, self.final_norm_H, eps, hidden_RH)
        self._keep(len(layers), hidden_RH, features_RF)
        return Forward(hidden_RH, features_RF)

    def _keep(self, index: int, state_RH: Tensor, features_RF: Tensor) -> None:
        """Copy the state to every feature of this layer; a small target may use one layer twice."""
        for at, wanted in enumerate(self.feature_layers):
            if wanted == index:
                features_RF[:, at * self.hidden_size : (at + 1) * self.hidden_size].copy_(state_RH)

    def logits(
        self, hidden_RH: Tensor, out_RW: Tensor | None = None, tokens: slice = slice(None)
    ) -> Tensor:
        """Return logits [R, W] fp32 from rows of `Forward.hidden_RH`, in `out_RW` if given.
        `tokens`: some of this rank's.
        """
        return self.placement.matmuls.linear(
            hidden_RH, Matrix(self.head_WH[tokens]), out_dtype=torch.float32, out_MN=out_RW
        )

    def parameters(self) -> Mapping[str, Stored]:
        """Return a view [out, in] of the live storage, including the shards of `peers`, for each
        Hugging Face name. A tied `lm_head.weight` is not listed.
        """
        shards = [model.own_parameters() for model in (self, *self.peers)]
        return pieces_of(shards, self.config, self.split.all)

    def own_parameters(self) -> dict[str, Tensor | QuantisedTensor]:
        """Return this rank's slices."""
        return dict(target_parameters(self, self.head_WH))

    def storage(self) -> list[Tensor]:
        """Return this rank's tensors of a version, in a fixed order. Fused maps are whole, as a
        commit launches a kernel for each of these.
        """
        head = [] if self.config.tied_embeddings else [self.head.stored]
        layers = [tensor for layer in self.layers for tensor in layer.storage()]
        return [self.embedding_VH, *layers, self.final_norm_H, *head]


def device_table(config: ModelConfig, placement: Placement) -> RotaryTable:
    """Return the rotary table on its device. All versions share it, as it is not a weight."""
    return _table_on(placement.device, config.rope, config.head_dim, config.max_position)


@lru_cache(maxsize=8)
def _table_on(device: torch.device, rope: Rope, head_dim: int, max_position: int) -> RotaryTable:
    return RotaryTable(*(half.to(device) for half in rotary_table(rope, head_dim, max_position)))


def shards(
    config: ModelConfig, placement: Placement, feature_layers: tuple[int, ...], split: Split
) -> GpuDecoder:
    """Return a rank's target, with the shards of the ranks that `split` builds for. `split` places
    their tensors; tensors that are not weights are left out.
    """
    elsewhere = replace(placement, device=torch.device("meta"), sums=OWN_SUMS)
    made: GpuDecoder = split.build(
        lambda each: GpuDecoder(
            config,
            placement=placement if each.rank == split.rank else elsewhere,
            feature_layers=feature_layers,
            split=each,
        )
    )
    return made
