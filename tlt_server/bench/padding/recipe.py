"""Every tensor of the padded pair. The small model's entries stand at `live` places; all others are
random, and change no output.

Why the outputs are the small model's (width d inside D, RMSNorm epsilon e):
- **Matrices that write to the residual stream** (o, down, fc, embedding) hold random values of
  2^-48 outside the live block: no zeros, which would flatter power and clocks, but bits as random
  as any weight's, whose sum is below the rounding of everything it is added to. So extra channels
  stay empty, and extra heads, units and layers add nothing. They are 32 % of the bytes that a step
  of a 7B reads; about one weight in 100,000 is exactly zero.
- **Matrices that read** (q, k, v, gate, up, LM head) are random at ordinary size: in live rows they
  read extra channels, which are empty.
- **RMSNorm** then sees the same sum of squares over D instead of d channels: weights are multiplied
  by sqrt(d / D), and the epsilon follows.
- **One constant channel** of value c comes after the live ones. The embedding writes it (and fc,
  from the first feature), and nothing adds to it. Its square is taken out of the epsilon:
  e' = (e d - c^2) / D. Layers ignore it (norm weight 0); the final norm makes it large, and the
  head's extra rows turn it into large negative logits: tokens beyond the small vocabulary are
  never sampled.

Legend: D hidden, V vocabulary, C draft vocabulary; `live` = places of the small model's entries
along an axis.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tlt_server.bench.padding.shapes import (
    Shape,
    check_fit,
    drafter_config,
    live_layers,
    target_config,
)
from tlt_server.errors import ModelError
from tlt_server.models.config import ModelConfig, read_json
from tlt_server.models.draft_checkpoint import feature_layers
from tlt_server.models.loader import read_tensors, tensor_files

# Size of random weights that write: a sum over 20,000 units of size 1 is 5e-13.
WHISPER = 2.0**-48
# The constant channel after the final norm, where the small residual's root mean square is 1.
SHOUT = 256.0
# The extra rows' weight on it: with a residual of 1,000 their logits are still below -500.
HUSH = -2048.0
DTYPES = (torch.float32, torch.bfloat16)  # a whisper needs eight bits of exponent

Named = Iterator[tuple[str, Tensor]]
Tensors = dict[str, Tensor]
ATTENTION = {
    "q_proj": ("query", "channel"),
    "k_proj": ("kv", "channel"),
    "v_proj": ("kv", "channel"),
    "o_proj": ("channel", "query"),
}
MLP = {
    "gate_proj": ("unit", "channel"),
    "up_proj": ("unit", "channel"),
    "down_proj": ("channel", "unit"),
}


class Axis(NamedTuple):
    size: int
    live: Tensor


@dataclass(frozen=True)
class Checkpoint:
    """One model of the pair. Each call of `tensors()` restarts its recipe."""

    source: Path  # the small model's directory: tokenizer, generation config, calibration
    config: dict[str, Any]
    _small: Tensors
    _padding: Padding

    def tensors(self) -> Named:
        """Yield (published name, tensor) one after another; the caller may keep or drop each."""
        is_drafter = "draft_vocab_size" in self.config
        return (
            self._padding.drafter(self._small)
            if is_drafter
            else self._padding.target(self._small, self.config)
        )


class Pair(NamedTuple):
    target: Checkpoint
    drafter: Checkpoint


def pad(
    target: str | Path,
    drafter: str | Path,
    shape: Shape,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Pair:
    """Return the pair of directories `target` and `drafter` in `shape`. `ModelError` if it does not
    fit.

    Extra entries depend on seed, tensor name, dtype and the kind of device. On `meta` only names,
    shapes and dtypes are made.
    """
    target, drafter = Path(target), Path(drafter)
    if dtype not in DTYPES:
        raise ModelError(
            f"dtype {dtype} cannot hold the padding; use {' or '.join(map(str, DTYPES))}"
        )
    raw_target, raw_drafter = read_json(target / "config.json"), read_json(drafter / "config.json")
    small, head = ModelConfig.read(target), ModelConfig.read(drafter)
    check_fit(small, head, raw_drafter.get("draft_vocab_size") or head.vocab_size, shape)
    target_tensors, drafter_tensors = _read(target), _read(drafter)
    _check_drafter(drafter, raw_drafter, drafter_tensors)
    width = small.hidden_size
    constant = 2.0 ** math.floor(
        math.log2(min(small.norm_eps, head.norm_eps) * width / 2) / 2
    )  # c^2 at most half of e d

    def epsilon(of: ModelConfig) -> float:
        return (of.norm_eps * width - constant**2) / shape.hidden

    live = live_layers(small.layers, shape.layers)
    features = [live[layer] for layer in feature_layers(drafter, small)]
    name = str(dtype).removeprefix("torch.")
    padding = partial(
        Padding,
        shape=shape,
        width=width,
        constant=constant,
        dtype=dtype,
        device=torch.device(device),
        seed=seed,
    )
    large = target_config(raw_target, shape, epsilon(small), name)
    large_head = drafter_config(raw_drafter, shape, epsilon(head), name, features)
    return Pair(
        Checkpoint(target, large, target_tensors, padding(small)),
        Checkpoint(drafter, large_head, drafter_tensors, padding(head)),
    )


def _check_drafter(drafter: Path, raw: dict[str, Any], tensors: Tensors) -> None:
    """Raise `ModelError` if the drafter's form cannot be padded."""
    if raw.get("norm_before_residual"):
        raise ModelError(
            f"{drafter}: 'norm_before_residual' is true; only a drafter whose residual stream "
            "begins before the norm can be padded"
        )
    if "embed_tokens.weight" in tensors:
        raise ModelError(
            f"{drafter}: the drafter has an embedding of its own; "
            "only one that reads its target's can be padded"
        )


def _read(directory: Path) -> Tensors:
    return {
        name: tensor
        for file, path in tensor_files(directory).items()
        for name, tensor in read_tensors(path, [file])
    }


class Padding:
    """One model's places and random numbers."""

    def __init__(
        self,
        small: ModelConfig,
        shape: Shape,
        width: int,
        constant: float,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
    ) -> None:
        self.small, self.shape, self.width, self.constant = small, shape, width, constant
        self.dtype, self.device, self.seed = dtype, device, seed
        self.norm_scale, self.loud = (
            (width / shape.hidden) ** 0.5,
            width**-0.5,
        )  # loud: extra heads and units see values of size 1
        hidden, channel = shape.hidden, torch.arange(width)
        group, large_group = small.heads // small.kv_heads, shape.heads // shape.kv_heads
        query_head = (
            torch.arange(small.heads) // group * large_group + torch.arange(small.heads) % group
        )
        self.axes = {
            "channel": Axis(hidden, channel),
            # The drafter's embedding, then its feature.
            "joined": Axis(2 * hidden, torch.cat([channel, hidden + channel])),
            "features": Axis(
                3 * hidden, torch.cat([channel, hidden + channel, 2 * hidden + channel])
            ),
            "query": Axis(shape.heads * shape.head_dim, _spans(query_head, shape.head_dim)),
            "kv": Axis(
                shape.kv_heads * shape.head_dim, torch.arange(small.kv_heads * shape.head_dim)
            ),
            "unit": Axis(shape.intermediate, torch.arange(small.intermediate_size)),
        }

    def target(self, small: Tensors, config: dict[str, Any]) -> Named:
        yield "model.embed_tokens.weight", self.embedding(small["model.embed_tokens.weight"])
        places = live_layers(self.small.layers, self.shape.layers)
        biased = {
            "qwen2": ("q_proj", "k_proj", "v_proj"),
            "llama": tuple(ATTENTION) if config.get("attention_bias") else (),
        }
        for layer in range(self.shape.layers):
            source = None
            if layer in places:
                source = _part(small, f"model.layers.{places.index(layer)}.")
            prefix = f"model.layers.{layer}."
            yield from self.norms(prefix, ("input_layernorm", "post_attention_layernorm"), source)
            yield from self.matrices(
                f"{prefix}self_attn.",
                ATTENTION,
                _part(source, "self_attn."),
                biased[self.shape.family],
            )
            yield from self.matrices(f"{prefix}mlp.", MLP, _part(source, "mlp."))
        yield "model.norm.weight", self.norm("model.norm.weight", small["model.norm.weight"], SHOUT)
        head = (
            small["model.embed_tokens.weight"]
            if self.small.tied_embeddings
            else small["lm_head.weight"]
        )
        yield "lm_head.weight", self.head("lm_head.weight", head, self.shape.vocab)

    def drafter(self, small: Tensors) -> Named:
        fusion = self.matrix("fc.weight", ("channel", "features"), small["fc.weight"])
        fusion[self.width, self.width] = 1.0  # hands the constant channel on
        yield "fc.weight", fusion
        source = _part(small, "midlayer.")
        joined = {
            name: axes if name == "o_proj" else (axes[0], "joined")
            for name, axes in ATTENTION.items()
        }
        yield from self.norms(
            "midlayer.", ("input_layernorm", "hidden_norm", "post_attention_layernorm"), source
        )
        yield from self.matrices("midlayer.self_attn.", joined, _part(source, "self_attn."))
        yield from self.matrices("midlayer.mlp.", MLP, _part(source, "mlp."))
        yield "norm.weight", self.norm("norm.weight", small["norm.weight"], SHOUT)
        yield (
            "lm_head.weight",
            self.head("lm_head.weight", small["lm_head.weight"], self.shape.draft_vocab),
        )
        yield from self.vocabulary_map(small["d2t"], len(small["t2d"]))

    def random(self, name: str, sizes: tuple[int, ...], std: float) -> Tensor:
        empty = torch.empty(sizes, dtype=self.dtype, device=self.device)
        if self.device.type == "meta":
            return empty
        digest = hashlib.blake2b(f"{self.seed}:{name}".encode(), digest_size=7).digest()
        return empty.normal_(
            0.0,
            std,
            generator=torch.Generator(self.device).manual_seed(int.from_bytes(digest, "big")),
        )

    def matrix(self, name: str, axes: tuple[str, ...], small: Tensor | None) -> Tensor:
        """Return `small` (zeros if the small model lacks the tensor) among random values; None:
        only random values.
        """
        chosen = [self.axes[axis] for axis in axes]
        large = self.random(
            name,
            tuple(axis.size for axis in chosen),
            WHISPER if axes[0] == "channel" else self.loud,
        )
        if small is not None:
            large[
                torch.meshgrid(*(axis.live.to(self.device) for axis in chosen), indexing="ij")
            ] = self.cast(small)
        return large

    def matrices(
        self,
        prefix: str,
        axes: dict[str, tuple[str, str]],
        source: Tensors | None,
        biased: tuple[str, ...] = (),
    ) -> Named:
        for name, (rows, columns) in axes.items():
            small = None if source is None else source[f"{name}.weight"]
            yield (
                f"{prefix}{name}.weight",
                self.matrix(f"{prefix}{name}.weight", (rows, columns), small),
            )
            if name in biased:
                none = torch.zeros(len(self.axes[rows].live))
                bias = None if source is None else source.get(f"{name}.bias", none)
                yield f"{prefix}{name}.bias", self.matrix(f"{prefix}{name}.bias", (rows,), bias)

    def norms(self, prefix: str, names: tuple[str, ...], source: Tensors | None) -> Named:
        for name in names:
            small = None if source is None else source[f"{name}.weight"]
            yield f"{prefix}{name}.weight", self.norm(f"{prefix}{name}.weight", small, 0.0)

    def norm(self, name: str, small: Tensor | None, constant: float) -> Tensor:
        """Return the padded norm. `constant`: the constant channel's output when the small
        residual's root mean square is 1.
        """
        large = self.random(name, (self.shape.hidden,), self.norm_scale)
        if small is not None:
            large[: self.width] = self.cast(small.float() * self.norm_scale)
        large[self.width] = constant * self.norm_scale / self.constant
        return large

    def embedding(self, small: Tensor) -> Tensor:
        """Return the padded embedding. Extra tokens repeat the small ones, so any prompt of the
        large vocabulary is a prompt of the small one.
        """
        large = self.random(
            "model.embed_tokens.weight", (self.shape.vocab, self.shape.hidden), WHISPER
        )
        large[:, : self.width] = self.cast(small)[
            torch.arange(self.shape.vocab, device=self.device) % len(small)
        ]
        large[:, self.width] = self.constant
        return large

    def head(self, name: str, small: Tensor, vocab: int) -> Tensor:
        large = self.random(name, (vocab, self.shape.hidden), self.loud)
        large[: len(small), : self.width] = self.cast(small)
        large[: len(small), self.width] = 0.0
        large[len(small) :, self.width] = HUSH
        return large

    def vocabulary_map(self, d2t_c: Tensor, vocab: int) -> Named:
        """Yield the vocabulary map: the small draft ids, then further ones spread over the extra
        tokens, ascending, in one dtype each.
        """
        count = self.shape.draft_vocab - len(d2t_c)
        further = vocab + torch.arange(count) * (self.shape.vocab - vocab) // max(1, count)
        ids_C = torch.cat([torch.arange(len(d2t_c)) + d2t_c, further])
        yield "d2t", (ids_C - torch.arange(len(ids_C))).to(self.device)
        yield (
            "t2d",
            torch.zeros(self.shape.vocab, dtype=torch.bool)
            .index_fill_(0, ids_C, True)
            .to(self.device),
        )

    def cast(self, small: Tensor) -> Tensor:
        return small.to(self.device, self.dtype)


def _spans(heads: Tensor, head_dim: int) -> Tensor:
    return (heads[:, None] * head_dim + torch.arange(head_dim)).flatten()


def _part(tensors: Tensors | None, prefix: str) -> Tensors | None:
    if tensors is None:
        return None
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
