"""The draft networks, one row each: the facts that hold on every device and in training.

A row names a network's classes, the target layers that it reads, and its tensors with their shapes.
Serving, training, the memory plan and the loaders use the row, so none of them compares network
names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tlt_server.errors import ModelError
from tlt_server.models.config import ModelConfig
from tlt_server.models.names import Parameters, drafter_parameters, eagle1_parameters

EAGLE3, EAGLE1 = "LlamaForCausalLMEagle3", "LlamaForCausalLMEagle"
VOCABULARY_MAP = frozenset({"d2t", "t2d"})
Shape = tuple[int, ...]


class Architecture(NamedTuple):
    """The facts of a draft network that hold on every device."""

    cpu: str  # "module:Class"
    gpu: str
    trained: str  # "module:Class" of the same network with trainable weights
    # Name, in `trainer.objectives`, by which the trainer of a server trains it, and the steps that
    # this objective unrolls.
    objective: str
    unrolled: int
    features: Callable[[dict[str, Any], ModelConfig, str], tuple[int, ...]]
    # False: it drafts with the target's embedding and head, over the whole vocabulary. Copies of
    # these in a checkpoint are not read.
    own_head: bool
    layer: str  # the start of its layer's tensor names
    inputs: int  # width of the layer's input / hidden size
    ends: Callable[[int, int], Mapping[str, Shape]]  # other matrices, by hidden size and draft ids
    norms: tuple[str, ...]
    parameters: Callable[[Any], Parameters]  # names and views of a serving network's tensors

    @property
    def vocabulary_map(self) -> frozenset[str]:
        """Return the checkpoint's tensors of the draft vocabulary."""
        return VOCABULARY_MAP if self.own_head else frozenset()

    def matrices(self, config: ModelConfig, draft_vocab: int) -> Mapping[str, Shape]:
        """Return the shapes [out, in] of all matrices, by name without `.weight`."""
        hidden, inner = config.hidden_size, config.intermediate_size
        query, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        inputs = self.inputs * hidden
        return {
            **self.ends(hidden, draft_vocab),
            f"{self.layer}self_attn.q_proj": (query, inputs),
            f"{self.layer}self_attn.k_proj": (kv, inputs),
            f"{self.layer}self_attn.v_proj": (kv, inputs),
            f"{self.layer}self_attn.o_proj": (hidden, query),
            f"{self.layer}mlp.gate_proj": (inner, hidden),
            f"{self.layer}mlp.up_proj": (inner, hidden),
            f"{self.layer}mlp.down_proj": (hidden, inner),
        }

    def shapes(self, config: ModelConfig, draft_vocab: int, *, join_bias: bool) -> dict[str, Shape]:
        """Return the shapes of all trained tensors of a checkpoint, matrices first."""
        matrices = self.matrices(config, draft_vocab)
        biased = ["fc"] if join_bias else []
        biased += [f"{self.layer}self_attn.{part}_proj" for part in "qkv" if config.attention_bias]
        biased += [
            f"{self.layer}mlp.{part}_proj" for part in ("gate", "up", "down") if config.mlp_bias
        ]
        return {
            **{f"{name}.weight": shape for name, shape in matrices.items()},
            **{f"{name}.weight": (config.hidden_size,) for name in self.norms},
            **{f"{name}.bias": matrices[name][:1] for name in biased},
        }


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
        "tlt_server.models.eagle:Eagle3",
        "tlt_server.models.gpu.eagle:GpuEagle3",
        "tlt_server.trainer.learning.network:TrainableEagle3",
        "eagle3",
        7,
        _three_layers,
        own_head=True,
        layer="midlayer.",
        inputs=2,
        ends=lambda hidden, drafted: {"fc": (hidden, 3 * hidden), "lm_head": (drafted, hidden)},
        norms=(
            "midlayer.input_layernorm",
            "midlayer.hidden_norm",
            "midlayer.post_attention_layernorm",
            "norm",
        ),
        parameters=drafter_parameters,
    ),
    EAGLE1: Architecture(
        "tlt_server.models.eagle:Eagle1",
        "tlt_server.models.gpu.eagle:GpuEagle1",
        "tlt_server.trainer.learning.network:TrainableEagle1",
        "eagle",
        1,
        _last_hidden,
        own_head=False,
        layer="layers.0.",
        inputs=1,
        ends=lambda hidden, drafted: {"fc": (hidden, 2 * hidden)},
        norms=("layers.0.post_attention_layernorm",),
        parameters=eagle1_parameters,
    ),
}
