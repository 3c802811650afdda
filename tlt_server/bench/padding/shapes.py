"""The large models' sizes, the small pairs that fit into them, and the resulting config.json.
`write_config` writes only sizes, for random weights.

A Qwen2 target fits, or a Llama without biases, in shapes of the same head width. A Llama shape has
room for a small model's q, k and v biases by `attention_bias` (the real one has none); Qwen3
normalises queries and keys, which nothing can undo. Rotary parameters are the small model's: the
frequencies must be, and cost nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tlt_server.errors import ModelError
from tlt_server.models.config import ModelConfig, read_json
from tlt_server.models.draft_networks import EAGLE3, layer_ids

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": False,
    },
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False},
}
KEPT = (  # fields of the small config
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


@dataclass(frozen=True)
class Shape:
    """The drafter has the target's width, heads and MLP, in one layer."""

    family: Literal["qwen2", "llama"]
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    draft_vocab: int
    max_position: int
    head_dim: int = 128

    def config(self, dtype: str) -> dict[str, Any]:
        """Return the config.json of a target of this shape with random weights."""
        raw = {"architectures": FAMILIES[self.family]["architectures"], "rope_theta": 1e6}
        return target_config(raw, self, 1e-6, dtype)

    @classmethod
    def read(cls, pair: Path) -> Shape:
        """Return the shape of a padded pair's directory."""
        target, drafter = (read_json(pair / part / "config.json") for part in ("target", "drafter"))
        return cls(
            target["model_type"],
            target["hidden_size"],
            target["intermediate_size"],
            target["num_hidden_layers"],
            target["num_attention_heads"],
            target["num_key_value_heads"],
            target["vocab_size"],
            drafter["draft_vocab_size"],
            target["max_position_embeddings"],
            target["head_dim"],
        )


SHAPES = {
    "mid": Shape("qwen2", 768, 1_536, 11, 6, 2, 5_512, 2_256, 4_096),
    "qwen2.5-7b": Shape("qwen2", 3_584, 18_944, 28, 28, 4, 152_064, 32_000, 32_768),
    "llama-3.1-8b": Shape("llama", 4_096, 14_336, 32, 32, 8, 128_256, 32_000, 131_072),
    "qwen2.5-32b": Shape("qwen2", 5_120, 27_648, 64, 40, 8, 152_064, 32_000, 32_768),
    "llama-3.1-70b": Shape("llama", 8_192, 28_672, 80, 64, 8, 128_256, 32_000, 131_072),
}


def write_config(directory: Path, shape: Shape, dtype: str) -> None:
    """Write the config.json of a target of this shape, for an engine that draws random weights."""
    (directory / "config.json").write_text(json.dumps(shape.config(dtype)))


def check_fit(target: ModelConfig, drafter: ModelConfig, draft_vocab: int, shape: Shape) -> None:
    """Raise `ModelError` unless the small pair fits into the shape."""
    if target.architecture not in ("Qwen2ForCausalLM", "LlamaForCausalLM"):
        raise ModelError(
            f"a {target.architecture} cannot be padded; "
            "the small target must be a Qwen2 or a Llama without q and k norms"
        )
    if drafter.architecture != EAGLE3:
        raise ModelError(
            f"a {drafter.architecture} cannot be padded; the small drafter must be a {EAGLE3}"
        )
    for who, small in (("target", target), ("drafter", drafter)):
        if small.mlp_bias or small.attention_bias:
            raise ModelError(
                f"the small {who} has mlp_bias or attention_bias set, "
                "which the large one has no place for; use one without"
            )
    for who, small in (("target", target), ("drafter", drafter)):
        if small.head_dim != shape.head_dim:
            raise ModelError(
                f"the small {who}'s head_dim {small.head_dim} is not the shape's "
                f"{shape.head_dim}; choose a shape that has it"
            )
        _check_sizes(
            who,
            {
                "hidden_size": (small.hidden_size + 1, shape.hidden),  # and the constant channel
                "intermediate_size": (small.intermediate_size, shape.intermediate),
                "num_key_value_heads": (small.kv_heads, shape.kv_heads),
                "query heads per KV head": (
                    small.heads // small.kv_heads,
                    shape.heads // shape.kv_heads,
                ),
            },
        )
    if target.layers > shape.layers:
        raise ModelError(
            f"the small target has {target.layers} layers, the large one {shape.layers}; "
            f"raise --layers to {target.layers}"
        )
    _check_sizes("target", {"vocab_size": (target.vocab_size, shape.vocab)})
    _check_sizes(
        "drafter",
        {
            "draft_vocab_size": (draft_vocab, shape.draft_vocab),
            "further draft ids": (shape.draft_vocab - draft_vocab, shape.vocab - target.vocab_size),
        },
    )


def _check_sizes(who: str, sizes: dict[str, tuple[int, int]]) -> None:
    for name, (needed, room) in sizes.items():
        if needed > room:
            raise ModelError(
                f"the small {who} does not fit: {name} needs {needed}, the shape has {room}; "
                "choose a larger shape"
            )


def live_layers(small: int, large: int) -> tuple[int, ...]:
    """Return the place of each small layer, spread over the depth. Layers in between add nothing,
    so a small layer's input stays the same.
    """
    return tuple(index * large // small for index in range(small))


def target_config(raw: dict[str, Any], shape: Shape, norm_eps: float, dtype: str) -> dict[str, Any]:
    biases = (
        {"attention_bias": True}
        if shape.family == "llama" and "Qwen2ForCausalLM" in raw["architectures"]
        else {}
    )
    return {
        **FAMILIES[shape.family],
        **biases,
        "vocab_size": shape.vocab,
        "num_hidden_layers": shape.layers,
        **_sizes(raw, shape, norm_eps, dtype),
    }


def drafter_config(
    raw: dict[str, Any], shape: Shape, norm_eps: float, dtype: str, features: list[int]
) -> dict[str, Any]:
    """`features`: layers of the large target whose inputs are read."""
    return {
        "architectures": [EAGLE3],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "num_hidden_layers": 1,
        "draft_vocab_size": shape.draft_vocab,
        "target_hidden_size": shape.hidden,
        "attention_bias": False,
        "mlp_bias": False,
        **_sizes(raw, shape, norm_eps, dtype),
        **layer_ids(features),
    }


def _sizes(raw: dict[str, Any], shape: Shape, norm_eps: float, dtype: str) -> dict[str, Any]:
    return {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        **{key: raw[key] for key in KEPT if key in raw},
    }
