"""LoRA adapters of a target in PEFT's layout: `adapter_config.json`, and two matrices for each
adapted linear map, so that y = x W^T + scale * (x A^T) B^T.

The tensors' names determine the adapted maps: `target_modules` may have paths or be a pattern,
which is not evaluated. Adapters that this server cannot compute exactly as PEFT would (DoRA,
biases, ranks that differ by module, other modules) are refused, with the field and value or the
tensor.

Legend: r rank, K inputs, N outputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tlt_server.errors import ModelError
from tlt_server.models.config import ModelConfig

BLOCKS = {  # linear map -> the block of a layer that holds it
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}
MODEL, PREFIX = "model.layers.", "base_model.model.model.layers."
_MATRIX = re.compile(re.escape(PREFIX) + r"(\d{1,5})\.(\w+)\.(\w+)\.lora_[AB]\.weight")
Map = tuple[int, str]  # a layer, and one of its linear maps
# Fields without effect on what is computed.
IGNORED = frozenset(
    "arrow_config auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config "
    "inference_mode loftq_config lora_dropout lora_ga_config megatron_core peft_version "
    "qalora_group_size revision runtime_config task_type".split()
)
READ = frozenset("r lora_alpha use_rslora target_modules peft_type init_lora_weights bias".split())
# Fields that leave some modules out, which have no tensors then.
SELECTING = frozenset("layers_to_transform layers_pattern exclude_modules".split())
# Ways to begin that leave the weights of the model as they are.
BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")
MAX_ALPHA = 2**20
NEUTRAL: tuple[object, ...] = (None, False, [], {}, "")


class LinearSizes(NamedTuple):
    inputs: int
    outputs: int


def linear_sizes(config: ModelConfig) -> dict[str, LinearSizes]:
    """Return the sizes of a layer's linear maps."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "q_proj": LinearSizes(hidden, queries),
        "k_proj": LinearSizes(hidden, keys),
        "v_proj": LinearSizes(hidden, keys),
        "o_proj": LinearSizes(queries, hidden),
        "gate_proj": LinearSizes(hidden, mlp),
        "up_proj": LinearSizes(hidden, mlp),
        "down_proj": LinearSizes(mlp, hidden),
    }


@dataclass(frozen=True)
class AdapterConfig:
    rank: int
    scale: float
    named: frozenset[str]  # ends of the paths of modules that must have tensors

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str, max_rank: int) -> AdapterConfig:
        """Parse the fields. `ModelError` names field, value and remedy. `where`: the source of the
        fields.
        """
        _check_neutral(raw, where)
        rank: Any = raw.get("r")
        alpha: Any = raw.get("lora_alpha")
        if not _whole(rank) or not 1 <= rank <= max_rank:
            raise _wrong(
                where, "r", rank, f"it must be 1 to {max_rank} (--max-lora-rank): train with less"
            )
        if not _number(alpha) or not 0 < alpha <= MAX_ALPHA:
            raise _wrong(where, "lora_alpha", alpha, f"it must be above 0, at most {MAX_ALPHA}")
        root = raw.get("use_rslora")
        if root not in (None, True, False):
            raise _wrong(where, "use_rslora", root, "it must be true or false")
        scale = alpha / (math.sqrt(rank) if root else rank)
        return cls(rank, scale, _named(raw, where))

    def maps(self, tensors: Iterable[str], layers: int) -> list[Map]:
        """Return the maps of a model that these tensors belong to, or should belong to."""
        found = {
            (int(parts[1]), parts[3])
            for parts in map(_MATRIX.fullmatch, tensors)
            if parts is not None and BLOCKS.get(parts[3]) == parts[2]
        }
        return [
            (layer, name)
            for layer in range(layers)
            for name, block in BLOCKS.items()
            if (layer, name) in found
            or not self.named.isdisjoint(_ends(f"{MODEL}{layer}.{block}.{name}"))
        ]


def _check_neutral(raw: Mapping[str, Any], where: str) -> None:
    if raw.get("peft_type") not in (None, "LORA"):
        raise _wrong(where, "peft_type", raw["peft_type"], "only LORA is served")
    if raw.get("bias") not in (None, "none"):
        raise _wrong(where, "bias", raw["bias"], 'only "none" is served: train without biases')
    begun = raw.get("init_lora_weights")
    if not any(begun is known or begun == known for known in BEGINNINGS):
        raise _wrong(
            where,
            "init_lora_weights",
            begun,
            "it changes the model's own weights, so the adapter does not fit them: convert it to "
            "an ordinary one (save_pretrained with path_initial_model_for_weight_conversion)",
        )
    for name in sorted(raw.keys() - IGNORED - READ - SELECTING):
        if raw[name] not in NEUTRAL:
            raise _wrong(where, name, raw[name], "this server does not compute that: leave it out")


def _named(raw: Mapping[str, Any], where: str) -> frozenset[str]:
    given = raw.get("target_modules")
    if given == "all-linear":
        given = [*BLOCKS]
    if isinstance(given, str | None) or any(raw.get(name) not in NEUTRAL for name in SELECTING):
        return frozenset()
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise _wrong(where, "target_modules", given, "it must be a list of names, or a pattern")
    return frozenset(given)


def _ends(path: str) -> Iterator[str]:
    """Yield a module's path, then the remainder after each dot."""
    while path:
        yield path
        _, _, path = path.partition(".")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return _whole(value) or isinstance(value, float)


def _wrong(where: str, field: str, value: Any, remedy: str) -> ModelError:
    return ModelError(f"{where}: {field} is {repr(value)[:80]}; {remedy}")


class MatrixPair(NamedTuple):
    """The two matrices of one linear map."""

    a_rK: Tensor
    b_Nr: Tensor


class AdapterWeights:
    """The matrices of one adapter, in host memory."""

    vocabulary_map: frozenset[str] = frozenset()  # a push of it brings no other tensors

    def __init__(
        self, config: ModelConfig, adapter: AdapterConfig, dtype: torch.dtype, maps: Iterable[Map]
    ) -> None:
        """`config`: of the adapted model. `maps`: the linear maps that have matrices."""
        self.config, self.adapter = config, adapter
        sizes = linear_sizes(config)
        self._pairs = {
            (layer, name): MatrixPair(
                torch.zeros(adapter.rank, sizes[name].inputs, dtype=dtype),
                torch.zeros(sizes[name].outputs, adapter.rank, dtype=dtype),
            )
            for layer, name in maps
        }

    def pairs(self) -> Iterator[tuple[int, str, MatrixPair]]:
        """Yield layer, linear map and matrices."""
        for (layer, name), pair in self._pairs.items():
            yield layer, name, pair

    def parameters(self) -> dict[str, Tensor]:
        """Return the matrices by PEFT's names."""
        named: dict[str, Tensor] = {}
        for layer, name, pair in self.pairs():
            prefix = f"{PREFIX}{layer}.{BLOCKS[name]}.{name}."
            named[f"{prefix}lora_A.weight"] = pair.a_rK
            named[f"{prefix}lora_B.weight"] = pair.b_Nr
        return named
