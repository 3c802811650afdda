"""Hugging Face's names of a model's tensors, once for every device: each function yields (name,
view of the live storage).

Devices differ in the layout and computation of weights, not in their names: a piece is any object
with the attributes that are read here. Loading a checkpoint and pushing new weights both write
through these views.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Parameters = Iterator[tuple[str, Any]]  # a name and its tensor; the frontend reads this, too


def map_parameters(parts: Mapping[str, int], tensors: Mapping[str, Any], prefix: str) -> Parameters:
    """Yield the tensors of linear maps that are fused. `parts`: the outputs of each map; `tensors`:
    those of all maps by kind, such as weight and bias, with the outputs first.
    """
    start = 0
    for part, width in parts.items():
        for kind, tensor in tensors.items():
            yield f"{prefix}{part}.{kind}", tensor[start : start + width]
        start += width


def attention_parameters(attention: Any, prefix: str) -> Parameters:
    yield from attention.qkv.parameters(prefix)
    yield from attention.output.parameters(prefix)
    if attention.q_weight_D is not None and attention.k_weight_D is not None:
        yield f"{prefix}q_norm.weight", attention.q_weight_D
        yield f"{prefix}k_norm.weight", attention.k_weight_D


def mlp_parameters(mlp: Any, prefix: str) -> Parameters:
    yield from mlp.gate_up.parameters(prefix)
    yield from mlp.down.parameters(prefix)


def target_parameters(model: Any, head_VH: Any) -> Parameters:
    """Yield the target's tensors. A tied `lm_head.weight` is not listed."""
    yield "model.embed_tokens.weight", model.embedding_VH
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}."
        yield f"{prefix}input_layernorm.weight", layer.input_norm_H
        yield f"{prefix}post_attention_layernorm.weight", layer.post_attention_norm_H
        yield from attention_parameters(layer.self_attention, f"{prefix}self_attn.")
        yield from mlp_parameters(layer.mlp, f"{prefix}mlp.")
    yield "model.norm.weight", model.final_norm_H
    if not model.config.tied_embeddings:
        yield "lm_head.weight", head_VH
