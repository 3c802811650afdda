"""EAGLE-3 draft network (arXiv 2503.01840) in the published checkpoint layout: one decoder layer
over the target's features.

Slot p holds (embedding of x_p, feature g_{p-1}); slot 0 is never used, so attention starts at
position 1. The layer's output h is the next drafted step's feature as it stands: `fuse` is for the
target's features only. Called by the `eagle` drafter.

Legend: R rows, H hidden, F = 3H feature width, C draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tlt_kernels.cpu.elementwise import add_rms_norm, rms_norm
from tlt_server.attention import BACKENDS
from tlt_server.attention.rows import KVCache, Rows
from tlt_server.errors import ModelError
from tlt_server.models.config import ModelConfig, read_json
from tlt_server.models.decoder import Decoder
from tlt_server.models.layers import GatedMlp, LayerShape, Projection, SelfAttention
from tlt_server.models.loader import check_tensor, fill, read_tensors, tensor_files
from tlt_server.models.names import drafter_parameters
from tlt_server.models.rope import rotary_table

ARCHITECTURE = "LlamaForCausalLMEagle3"
VOCABULARY_MAP = {"d2t", "t2d"}


def feature_layers(directory: str | Path, target: ModelConfig) -> tuple[int, ...]:
    """Target layers whose inputs the drafter in `directory` reads; what
    `load_target(feature_layers=...)` needs.

    `eagle_aux_hidden_state_layer_ids` counts layer inputs at the top level of config.json, but
    layer outputs (one less) inside `eagle_config`: both conventions are in use. Without either: [2,
    L // 2, L - 3].
    """
    source = Path(directory) / "config.json"
    raw = read_json(source)
    nested = raw.get("eagle_config") or {}
    ids, shift = raw.get("eagle_aux_hidden_state_layer_ids"), 0
    if ids is None:
        ids, shift = nested.get("eagle_aux_hidden_state_layer_ids"), 1
    if ids is None:
        ids, shift = [2, target.layers // 2, target.layers - 3], 0
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


class Described(NamedTuple):
    """The network that a drafter's directory describes."""

    config: ModelConfig
    draft_vocab_size: int
    own_embedding: bool


class Served(Protocol):
    """The target that a drafter must fit, on any device."""

    config: ModelConfig
    feature_layers: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    max_position: int


class Fillable(Protocol):
    """An EAGLE-3 network to be filled, on any device."""

    draft_vocab_size: int
    vocab_size: int

    def parameters(self) -> dict[str, Tensor]: ...

    def set_vocabulary(self, d2t_C: Tensor, t2d_V: Tensor, path: Path) -> None: ...


def describe(directory: Path, target: Served) -> Described:
    """`ModelError` when it does not fit the target."""
    source = directory / "config.json"
    raw = read_json(source)
    config = ModelConfig.parse(raw, str(source))
    if config.architecture != ARCHITECTURE:
        raise ModelError(
            f"{source}: architecture {config.architecture!r} is not a drafter; expected "
            f"{ARCHITECTURE!r}"
        )
    wanted = feature_layers(directory, target.config)
    if target.feature_layers != wanted:
        raise ModelError(
            f"{source}: the drafter reads target layers {wanted}, the target gives "
            f"{target.feature_layers}; "
            "load the target with the drafter's feature layers"
        )
    for field in ("hidden_size", "vocab_size"):
        found, expected = getattr(config, field), getattr(target, field)
        if found != expected:
            raise ModelError(
                f"{source}: {field!r} is {found}, the target's is {expected}; use a drafter "
                "trained for this target"
            )
    draft_vocab = raw.get("draft_vocab_size") or config.vocab_size
    if type(draft_vocab) is not int or not 0 < draft_vocab <= config.vocab_size:
        raise ModelError(
            f"{source}: 'draft_vocab_size' is {draft_vocab!r}; expected 1 to {config.vocab_size}"
        )
    config = replace(config, max_position=target.max_position)
    return Described(
        config, draft_vocab, own_embedding="embed_tokens.weight" in tensor_files(directory)
    )


def fill_drafter(network: Fillable, directory: Path) -> None:
    """Weights and vocabulary map of a published checkpoint."""
    fill(network.parameters(), directory, ignored=VOCABULARY_MAP)
    files, vocab, count = tensor_files(directory), network.vocab_size, network.draft_vocab_size
    expected = {
        "d2t": torch.empty(count, dtype=torch.int64),
        "t2d": torch.empty(vocab, dtype=torch.bool),
    }
    absent = [name for name in expected if name not in files]
    if absent:
        if len(absent) == 2 and count == vocab:
            return  # the whole vocabulary: identity
        raise ModelError(
            f"{directory}: tensor {absent[0]!r} is missing, expected shape "
            f"{list(expected[absent[0]].shape)}; "
            "export the drafter again with its vocabulary map"
        )
    found = {}
    for name in expected:
        ((_, found[name]),) = read_tensors(files[name], [name])
    network.set_vocabulary(found["d2t"], found["t2d"], files["d2t"])


def target_ids(d2t_C: Tensor, t2d_V: Tensor, count: int, vocab: int, path: Path) -> Tensor:
    """Draft id -> target id, int64 [C], as a checkpoint's two tensors say; `ModelError` where they
    disagree.
    """
    check_tensor("d2t", d2t_C, torch.empty(count, dtype=torch.int64), path)
    check_tensor("t2d", t2d_V, torch.empty(vocab, dtype=torch.bool), path)
    ids = torch.arange(count) + d2t_C
    within = bool(((ids >= 0) & (ids < vocab)).all())
    if not within or not t2d_V[ids].all() or int(t2d_V.sum()) != count:
        raise ModelError(
            f"{path}: tensors 'd2t' and 't2d' contradict each other or leave the vocabulary of "
            f"{vocab}; "
            "export the drafter again"
        )
    return ids


class Eagle3:
    """Layers and storage of one drafter, sharing the target's numerics, page size and (where
    absent) embedding.
    """

    def __init__(
        self, config: ModelConfig, draft_vocab_size: int, target: Decoder, *, own_embedding: bool
    ) -> None:
        hidden, numerics = config.hidden_size, target.numerics
        self.config, self.numerics, self.page_size = config, numerics, target.page_size
        self.draft_vocab_size, self.vocab_size, self.max_position = (
            draft_vocab_size,
            target.vocab_size,
            config.max_position,
        )
        self.kv_layers, self.kv_heads, self.head_dim = 1, config.kv_heads, config.head_dim
        self.own_embedding = own_embedding
        self.embedding_VH = (
            torch.zeros(target.vocab_size, hidden) if own_embedding else target.embedding_VH
        )
        self.fusion = Projection(
            target.feature_width, {"fc": hidden}, bias=False, numerics=numerics
        )
        self.embedding_norm_H, self.feature_norm_H = torch.ones(hidden), torch.ones(hidden)
        self.post_attention_norm_H, self.final_norm_H = torch.ones(hidden), torch.ones(hidden)
        shape = LayerShape(qkv_bias=config.attention_bias, mlp_bias=config.mlp_bias)
        backend = BACKENDS.resolve(target.attention_name)(
            page_size=target.page_size,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
        )
        self.self_attention = SelfAttention(
            2 * hidden,
            hidden,
            config.heads,
            config.kv_heads,
            config.head_dim,
            shape=shape,
            norm_eps=config.norm_eps,
            table=rotary_table(config.rope, config.head_dim, config.max_position),
            attention=backend,
            numerics=numerics,
        )
        self.mlp = GatedMlp(
            hidden, config.intermediate_size, bias=config.mlp_bias, numerics=numerics
        )
        self.head = Projection(hidden, {"lm_head": draft_vocab_size}, bias=False, numerics=numerics)
        self.target_ids = torch.arange(draft_vocab_size)  # int64 [C], draft id -> target id

    @classmethod
    def load(cls, directory: str | Path, target: Decoder) -> Eagle3:
        """Raises `ModelError`. The target must have been built with this drafter's
        `feature_layers`.
        """
        directory = Path(directory)
        drafter = cls.empty(directory, target)
        fill_drafter(drafter, directory)
        return drafter

    @classmethod
    def empty(cls, directory: Path, target: Decoder) -> Eagle3:
        """The network that the directory describes, its storage not filled; `ModelError` when it
        does not fit the target.
        """
        described = describe(directory, target)
        return cls(
            described.config,
            described.draft_vocab_size,
            target,
            own_embedding=described.own_embedding,
        )

    def blank(self, target: Decoder, *, own_embedding: bool) -> Eagle3:
        """Return the same network with storage of its own, to be filled with other weights; the
        vocabulary map is kept until another is set.
        """
        network = Eagle3(self.config, self.draft_vocab_size, target, own_embedding=own_embedding)
        network.target_ids = self.target_ids
        return network

    def follow(self, target: Decoder) -> None:
        """Read the embedding of this target from now on, unless the drafter has its own."""
        if not self.own_embedding:
            self.embedding_VH = target.embedding_VH

    def set_vocabulary(self, d2t_C: Tensor, t2d_V: Tensor, path: Path) -> None:
        """Map draft ids to target ids as a checkpoint's two tensors say; they must agree. `path`
        names them in errors.
        """
        self.target_ids = target_ids(d2t_C, t2d_V, self.draft_vocab_size, self.vocab_size, path)

    def fuse(self, features_RF: Tensor) -> Tensor:
        """The target's features of position p - 1 as the drafter's g: [R, H]."""
        return self.fusion(features_RF)

    def forward(self, rows: Rows, g_RH: Tensor, cache: KVCache) -> Tensor:
        """Write KV of rows (x_p, g_{p-1}) at positions p >= 1; return h_RH, the feature of p."""
        attended_RH = self.self_attention(
            self._normed(rows, g_RH), cache.k[0], cache.v[0], rows, first=1
        )
        residual_RH = g_RH.clone()
        normed_RH = add_rms_norm(
            attended_RH, residual_RH, self.post_attention_norm_H, self.config.norm_eps
        )
        return residual_RH.add_(self.mlp(normed_RH))

    def store_only(self, rows: Rows, g_RH: Tensor, cache: KVCache) -> None:
        """Write the rows' KV and compute nothing else: catch-up over committed tokens."""
        self.self_attention.store(self._normed(rows, g_RH), cache.k[0], cache.v[0], rows)

    def logits(self, h_RH: Tensor) -> Tensor:
        """[R, C] over the draft vocabulary, predicting x_{p+1}."""
        return self.head(rms_norm(h_RH, self.final_norm_H, self.config.norm_eps))

    def _normed(self, rows: Rows, g_RH: Tensor) -> Tensor:
        embedded_RH = self.embedding_VH.index_select(0, rows.token_R)
        eps = self.config.norm_eps
        return torch.cat(
            [
                rms_norm(embedded_RH, self.embedding_norm_H, eps),
                rms_norm(g_RH, self.feature_norm_H, eps),
            ],
            dim=1,
        )

    def make_cache(self, pages: int, page_size: int, scratch: int) -> KVCache:
        assert page_size == self.page_size, (
            f"built for pages of {self.page_size}, asked for {page_size}"
        )
        return KVCache(
            layers=1,
            pages=pages,
            page_size=page_size,
            scratch=scratch,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
        )

    def parameters(self) -> dict[str, Tensor]:
        """Map published names to views [out, in] of the live storage, without d2t and t2d."""
        return dict(drafter_parameters(self))
