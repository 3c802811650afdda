"""The draft networks, one row each: the facts that hold on every device and in training.

A row names a network's classes, the target layers that it reads, and its tensors with their shapes.
Serving, training, the memory plan and the loaders use the row, so none of them compares network
names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from tlt_server.errors import ModelError
from tlt_server.models.config import ModelConfig
from tlt_server.models.names import Parameters, attention_parameters, mlp_parameters

EAGLE3, EAGLE1 = "LlamaForCausalLMEagle3", "LlamaForCausalLMEagle"
QKV, MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")
VOCABULARY_MAP = frozenset({"d2t", "t2d"})
Shape = tuple[int, ...]
# The layouts of `tlt drafter export`: the rows of `trainer.exporting.export_layouts.EXPORTS`.
Layout = Literal["eagle3", "sglang", "speculators", "eagle1"]


class Architecture(NamedTuple):
    """The facts of a draft network that hold on every device."""

    name: str  # the one that `tlt drafter init --network` takes and figures show
    cpu: str  # "module:Class"
    gpu: str
    trained: str  # "module:Class" of the same network with trainable weights
    # Name, in `trainer.objectives`, by which the trainer of a server trains it, and the steps that
    # this objective unrolls.
    objective: str
    unrolled: int
    features: Callable[[dict[str, Any], ModelConfig, str], tuple[int, ...]]
    # The entries of an untrained one's config.json that name the layers it reads.
    untrained: Callable[[ModelConfig], dict[str, Any]]
    # False: it drafts with the target's embedding and head, over the whole vocabulary. Copies of
    # these in a checkpoint are not read.
    own_head: bool
    layer: str  # the start of its layer's tensor names
    inputs: int  # width of the layer's input / hidden size
    # Shapes [out, in] of all matrices by name without `.weight`. The number is that of draft ids.
    matrices: Callable[[ModelConfig, int], Mapping[str, Shape]]
    norms: tuple[str, ...]
    parameters: Callable[[Any], Parameters]  # names and views of a serving network's tensors

    @property
    def vocabulary_map(self) -> frozenset[str]:
        """Return the checkpoint's tensors of the draft vocabulary."""
        return VOCABULARY_MAP if self.own_head else frozenset()

    def shapes(self, config: ModelConfig, draft_vocab: int, *, join_bias: bool) -> dict[str, Shape]:
        """Return the shapes of all trained tensors of a checkpoint, matrices first."""
        matrices = self.matrices(config, draft_vocab)
        biased = ["fc"] if join_bias else []
        for asked, parts in ((config.attention_bias, QKV), (config.mlp_bias, MLP)):
            biased += [name for name in matrices if asked and name.endswith(parts)]
        return {
            **{f"{name}.weight": shape for name, shape in matrices.items()},
            **{f"{name}.weight": (config.hidden_size,) for name in self.norms},
            **{f"{name}.bias": matrices[name][:1] for name in biased},
        }


def decoder_layer(config: ModelConfig, layer: str, inputs: int) -> dict[str, Shape]:
    """Return the matrices of a layer whose attention reads `inputs` values."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        f"{layer}self_attn.q_proj": (query, inputs),
        f"{layer}self_attn.k_proj": (kv, inputs),
        f"{layer}self_attn.v_proj": (kv, inputs),
        f"{layer}self_attn.o_proj": (hidden, query),
        f"{layer}mlp.gate_proj": (inner, hidden),
        f"{layer}mlp.up_proj": (inner, hidden),
        f"{layer}mlp.down_proj": (hidden, inner),
    }


def _eagle3_matrices(config: ModelConfig, drafted: int) -> dict[str, Shape]:
    hidden = config.hidden_size
    ends = {"fc": (hidden, 3 * hidden), "lm_head": (drafted, hidden)}
    return {**ends, **decoder_layer(config, "midlayer.", 2 * hidden)}


def _eagle1_matrices(config: ModelConfig, drafted: int) -> dict[str, Shape]:
    hidden = config.hidden_size
    return {"fc": (hidden, 2 * hidden), **decoder_layer(config, "layers.0.", hidden)}


def _eagle3_parameters(network: Any) -> Parameters:
    """Yield the tensors of an EAGLE-3 checkpoint, without its vocabulary map."""
    if network.own_embedding:
        yield "embed_tokens.weight", network.embedding_VH
    yield from network.fusion.parameters()
    yield "midlayer.input_layernorm.weight", network.embedding_norm_H
    yield "midlayer.hidden_norm.weight", network.feature_norm_H
    yield "midlayer.post_attention_layernorm.weight", network.post_attention_norm_H
    yield from attention_parameters(network.self_attention, "midlayer.self_attn.")
    yield from mlp_parameters(network.mlp, "midlayer.mlp.")
    yield "norm.weight", network.final_norm_H
    yield from network.head.parameters()


def _eagle1_parameters(network: Any) -> Parameters:
    """Yield the tensors of an EAGLE-1 or EAGLE-2 checkpoint, without copies of the target's."""
    yield from network.joint.parameters()
    yield from attention_parameters(network.self_attention, "layers.0.self_attn.")
    yield "layers.0.post_attention_layernorm.weight", network.post_attention_norm_H
    yield from mlp_parameters(network.mlp, "layers.0.mlp.")


def _three_layers(raw: dict[str, Any], target: ModelConfig, source: str) -> tuple[int, ...]:
    """Return the target layers of EAGLE-3. `eagle_aux_hidden_state_layer_ids` counts layer inputs
    at the top level of config.json, but layer outputs (one less) inside `eagle_config`: both
    conventions are in use. Without either: [2, L // 2, L - 3].
    """
    nested = raw.get("eagle_config") or {}
    ids, shift = raw.get("eagle_aux_hidden_state_layer_ids"), 0
    if ids is None:
        ids, shift = nested.get("eagle_aux_hidden_state_layer_ids"), 1
    if ids is None:
        ids, shift = list(usual_layers(target)), 0
    if (
        not isinstance(ids, list)
        or len(ids) != 3
        or not all(type(i) is int and 0 <= i + shift < target.layers for i in ids)
    ):
        raise ModelError(
            f"{source}: feature layers {ids!r} do not fit a target of {target.layers} layers; "
            "expected three of its layers"
        )
    return tuple(i + shift for i in ids)


def layer_ids(layers: Sequence[int]) -> dict[str, Any]:
    """Return the entries of config.json that name an EAGLE-3 network's layers, in both
    conventions.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    outputs = [layer - 1 for layer in layers]
    return {name: [*layers], "eagle_config": {name: outputs, "use_aux_hidden_state": True}}


def usual_layers(target: ModelConfig) -> tuple[int, int, int]:
    """Return the feature layers of an EAGLE-3 network that names none."""
    return 2, target.layers // 2, target.layers - 3


def layers_within(layers: int) -> tuple[int, int, int]:
    """Return the usual feature layers of a target, or the nearest ones if it has too few."""
    return min(2, layers - 1), layers // 2, max(layers - 3, 0)


def _last_hidden(raw: dict[str, Any], target: ModelConfig, source: str) -> tuple[int, ...]:
    """Return the layer index of the target's hidden state after its final norm, the input of its
    head.
    """
    return (target.layers,)


ARCHITECTURES = {
    EAGLE3: Architecture(
        "eagle3",
        "tlt_server.models.eagle:Eagle3",
        "tlt_server.models.gpu.eagle:GpuEagle3",
        "tlt_server.trainer.learning.network:TrainableEagle3",
        "eagle3",
        7,
        _three_layers,
        lambda target: layer_ids(layers_within(target.layers)),
        own_head=True,
        layer="midlayer.",
        inputs=2,
        matrices=_eagle3_matrices,
        norms=(
            "midlayer.input_layernorm",
            "midlayer.hidden_norm",
            "midlayer.post_attention_layernorm",
            "norm",
        ),
        parameters=_eagle3_parameters,
    ),
    EAGLE1: Architecture(
        "eagle1",
        "tlt_server.models.eagle:Eagle1",
        "tlt_server.models.gpu.eagle:GpuEagle1",
        "tlt_server.trainer.learning.network:TrainableEagle1",
        "eagle",
        1,
        _last_hidden,
        lambda target: {},
        own_head=False,
        layer="layers.0.",
        inputs=1,
        matrices=_eagle1_matrices,
        norms=("layers.0.post_attention_layernorm",),
        parameters=_eagle1_parameters,
    ),
}
NETWORKS = {row.name: architecture for architecture, row in ARCHITECTURES.items()}
