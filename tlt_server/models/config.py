"""A model's shape, parsed strictly from an ordinary Hugging Face `config.json`.

Read once by the loader; frozen. Models that this server cannot compute exactly as the reference
implementation would (sliding windows, partial rotary embeddings, unknown scalings, other
activations) are refused by name instead of approximated.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tlt_server.errors import ModelError, StartupError
from tlt_server.models import FAMILIES
from tlt_server.models.quantization import (
    UNQUANTISED,
    LayerQuantization,
    Quantization,
    parse_quantization,
)
from tlt_server.settings.server import QuantizationName, SharedSettings

MAX_POSITIONS = 1 << 22  # a rotary table of this length takes 4 GB at a head width of 128


@dataclass(frozen=True)
class Rope:
    """Rotary embedding; fields beyond `theta` belong to the scaling named by `kind`."""

    kind: str = "default"  # default | linear | llama3 | yarn
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position: int = 0  # positions the unscaled model was trained on
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float | None = None  # yarn; None = from factor
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn


@dataclass(frozen=True)
class LayerShape:
    """Differences between families that the config's numbers do not express."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


def llama(config: ModelConfig) -> LayerShape:
    """Llama 2 and 3: plain attention; biases only where the config says so."""
    return LayerShape(config.attention_bias, config.attention_bias, config.mlp_bias)


def qwen2(config: ModelConfig) -> LayerShape:
    """Qwen2 and 2.5: biases on queries, keys and values."""
    return LayerShape(qkv_bias=True)


def qwen3(config: ModelConfig) -> LayerShape:
    """Qwen3 (dense): RMSNorm on each query and key head before the rotation."""
    return LayerShape(config.attention_bias, config.attention_bias, qk_norm=True)


@dataclass(frozen=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    rope: Rope
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]
    quantization: Quantization | None = None

    @property
    def layer_shape(self) -> LayerShape:
        """The layers of its family. `StartupError` for an architecture that is not known."""
        found: LayerShape = FAMILIES.resolve(self.architecture)(self)
        return found

    @property
    def shape(self) -> str:
        """Return everything that the time of a step depends on, as in error messages."""
        return (
            f"{self.layers} layers, hidden {self.hidden_size}, MLP {self.intermediate_size}, "
            f"heads {self.heads}/{self.kv_heads}, vocab {self.vocab_size}"
            f"{', FP8' * (self.quantization is not None)}"
        )

    def quantised_maps(self, layer: int) -> LayerQuantization:
        """Return which linear maps of a layer are in FP8."""
        return self.quantization.layer(layer) if self.quantization else UNQUANTISED

    def stored_as(self, asked: QuantizationName | None, where: str) -> ModelConfig:
        """Return the config with the quantization that is served. `asked`: the setting; `where`:
        the model in errors.
        """
        if asked == "none" and self.quantization is not None:
            raise StartupError(
                f"quantization is none, and the weights of {where} are in FP8; leave the setting "
                "out, or serve the checkpoint that they were made from"
            )
        if asked == "fp8" and self.quantization is None:
            return replace(self, quantization=Quantization())
        return self

    @classmethod
    def read(cls, directory: Path) -> ModelConfig:
        return cls.parse(read_json(directory / "config.json"), str(directory / "config.json"))

    @classmethod
    def served(cls, settings: SharedSettings) -> ModelConfig:
        """The model's config, with as many positions as the longest sequence that is served.
        `StartupError` when the model or this server has fewer than asked for.
        """
        config = cls.read(Path(settings.model))
        config = config.stored_as(settings.quantization, str(settings.model))
        chosen = settings.max_model_len or config.max_position
        if chosen > config.max_position:
            raise StartupError(
                f"max_model_len {chosen} exceeds the model's {config.max_position} positions; "
                "lower it"
            )
        if chosen > MAX_POSITIONS:
            raise StartupError(
                f"max_model_len {chosen} is above this server's limit of {MAX_POSITIONS} "
                "positions; lower it"
            )
        return replace(config, max_position=chosen)

    @classmethod
    def parse(cls, raw: dict[str, Any], source: str) -> ModelConfig:
        """`source`: the file's name in errors."""
        fields = _Fields(raw, source)
        architectures = raw.get("architectures")
        if (
            not isinstance(architectures, list)
            or not architectures
            or not isinstance(architectures[0], str)
        ):
            raise ModelError(
                f"{source}: 'architectures' is {architectures!r}; expected a list such as "
                "['LlamaForCausalLM']"
            )
        _refuse_windows(raw, source)
        activation = raw.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise ModelError(f"{source}: 'hidden_act' is {activation!r}; only 'silu' is supported")
        hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
        kv_heads = fields.count("num_key_value_heads", default=heads)
        head_dim = fields.count("head_dim", default=hidden // heads)
        if heads % kv_heads:
            raise ModelError(
                f"{source}: 'num_attention_heads' {heads} is not a multiple of "
                f"'num_key_value_heads' {kv_heads}"
            )
        if head_dim % 2:
            raise ModelError(
                f"{source}: head_dim {head_dim} is odd; rotary embeddings need an even one"
            )
        max_position = fields.count("max_position_embeddings")
        layers = fields.count("num_hidden_layers")
        return cls(
            architecture=architectures[0],
            vocab_size=fields.count("vocab_size", least=2),
            hidden_size=hidden,
            intermediate_size=fields.count("intermediate_size"),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            max_position=max_position,
            norm_eps=fields.number("rms_norm_eps", default=1e-6),
            rope=_rope(raw, max_position, source),
            tied_embeddings=fields.flag("tie_word_embeddings"),
            attention_bias=fields.flag("attention_bias"),
            mlp_bias=fields.flag("mlp_bias"),
            eos_token_ids=token_ids(raw, source),
            quantization=parse_quantization(raw, layers, source),
        )


def read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path}: the file is missing; point to a complete Hugging Face model directory"
        ) from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ModelError(
            f"{path}: not readable as JSON ({error}); download the file again"
        ) from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: holds {type(raw).__name__}; expected a JSON object")
    return raw


def token_ids(raw: dict[str, Any], source: str, key: str = "eos_token_id") -> tuple[int, ...]:
    value = raw.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ModelError(
            f"{source}: {key!r} is {value!r}; expected a token id or a list of token ids"
        )
    return tuple(ids)


@dataclass(frozen=True)
class _Fields:
    """Typed access to one JSON object."""

    raw: dict[str, Any]
    source: str

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if type(value) is not int or value < least:
            raise ModelError(
                f"{self.source}: {key!r} is {value!r}; expected a whole number of at least {least}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw.get(key)
        value = default if value is None else value
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not 0 < value < float("inf")
        ):
            raise ModelError(f"{self.source}: {key!r} is {value!r}; expected a positive number")
        return float(value)

    def optional(self, key: str) -> float | None:
        return None if self.raw.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.raw.get(key)
        value = default if value is None else value
        if type(value) is not bool:
            raise ModelError(f"{self.source}: {key!r} is {value!r}; expected true or false")
        return value


def _refuse_windows(raw: dict[str, Any], source: str) -> None:
    other = sorted({kind for kind in raw.get("layer_types") or [] if kind != "full_attention"})
    # Qwen configs carry a `sliding_window` that `use_sliding_window: false` (their default) turns
    # off.
    default = (
        not str(raw.get("model_type", "")).startswith("qwen")
        and raw.get("sliding_window") is not None
    )
    if other or raw.get("use_sliding_window", default):
        what = f"layer_types {other}" if other else f"sliding_window {raw.get('sliding_window')!r}"
        raise ModelError(
            f"{source}: {what} is not supported; only full attention is: choose a model without "
            "sliding windows"
        )


def _rope(raw: dict[str, Any], max_position: int, source: str) -> Rope:
    """Parse `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (older
    versions).
    """
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise ModelError(
            f"{source}: rope parameters are {scaling!r}; expected one object for all layers"
        )
    merged = {
        "rope_theta": raw.get("rope_theta"),
        "partial_rotary_factor": raw.get("partial_rotary_factor"),
        **scaling,
    }
    fields = _Fields(merged, source)
    kind = merged.get("rope_type") or merged.get("type") or "default"
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ModelError(
            f"{source}: rope type {kind!r} is not supported; known are default, linear, llama3, "
            "yarn"
        )
    if fields.number("partial_rotary_factor", default=1.0) != 1.0:
        raise ModelError(
            f"{source}: 'partial_rotary_factor' {merged['partial_rotary_factor']!r} is not "
            "supported; only 1.0 is"
        )
    theta = fields.number("rope_theta", default=10_000.0)
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(kind=kind, theta=theta, factor=fields.number("factor"))
    original = fields.count(
        "original_max_position_embeddings", default=raw.get("original_max_position_embeddings")
    )
    if kind == "llama3":
        return Rope(
            kind=kind,
            theta=theta,
            factor=fields.number("factor"),
            original_max_position=original,
            low_freq_factor=fields.number("low_freq_factor"),
            high_freq_factor=fields.number("high_freq_factor"),
        )
    return Rope(
        kind=kind,
        theta=theta,
        factor=fields.number("factor", default=max_position / original),
        original_max_position=original,
        beta_fast=fields.number("beta_fast", default=32.0),
        beta_slow=fields.number("beta_slow", default=1.0),
        truncate=fields.flag("truncate", default=True),
        attention_factor=fields.optional("attention_factor"),
        mscale=fields.optional("mscale"),
        mscale_all_dim=fields.optional("mscale_all_dim"),
    )
