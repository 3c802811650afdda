"""Checkpoints of draft networks: what a directory describes, whether it fits a target, and its
weights.

Called by the loaders of the `eagle` drafter on any device, and to find the target's features in
advance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tlt_server.errors import ModelError
from tlt_server.models.config import ModelConfig
from tlt_server.models.draft_layouts import Raw, read_layout
from tlt_server.models.draft_networks import ARCHITECTURES, Architecture
from tlt_server.models.loader import check_files, check_tensor, fill, read_tensors, tensor_files
from tlt_server.models.shards import Stored

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# The target's tensors, which checkpoints of a network without a head of its own repeat.
COPIES = frozenset({"embed_tokens.weight", "lm_head.weight"})


class Described(NamedTuple):
    """The network that a drafter's directory describes."""

    config: ModelConfig
    draft_vocab_size: int
    own_embedding: bool = False
    join_bias: bool = False  # EAGLE-1: `fc` has a bias
    norm_before_residual: bool = False  # EAGLE-3: the residual stream begins after the norm

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.config.architecture]


class Served(Protocol):
    """The target that a drafter must fit, on any device."""

    config: ModelConfig
    feature_layers: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    max_position: int


class Fillable(Protocol):
    """A draft network whose tensors can be filled, on any device."""

    config: ModelConfig
    draft_vocab_size: int
    vocab_size: int

    def parameters(self) -> Mapping[str, Stored]: ...

    def set_vocabulary(self, d2t_C: Tensor, t2d_V: Tensor, path: Path) -> None: ...


def feature_layers(directory: str | Path, target: ModelConfig) -> tuple[int, ...]:
    """Return the target layers whose inputs the drafter in `directory` reads, for
    `load_target(feature_layers=...)`. Raises `ModelError`.
    """
    directory = Path(directory)
    _, raw = read_layout(directory)
    return _architecture(raw, directory).features(raw, target, str(directory / "config.json"))


def _architecture(raw: Raw, directory: Path) -> Architecture:
    named = raw.get("architectures")
    known = [name for name in ARCHITECTURES if named == [name]]
    if not known:
        raise ModelError(
            f"{directory / 'config.json'}: architectures {named!r} are not those of a drafter; "
            f"expected one of {', '.join(map(repr, ARCHITECTURES))}. The files of EAGLE-1 and "
            "EAGLE-2 name the target's: write the last one in their config.json"
        )
    return ARCHITECTURES[known[0]]


def describe(directory: Path, target: Served) -> Described:
    """Return the network that a directory describes. `ModelError` if it does not fit the target."""
    source = directory / "config.json"
    _, raw = read_layout(directory)
    architecture = _architecture(raw, directory)
    config = ModelConfig.parse(raw, str(source))
    if config.quantization is not None:
        raise ModelError(
            f"{source}: 'quantization_config' says that the drafter's weights are in FP8; drafters "
            "are read in bfloat16 and quantised here: start that one with "
            "--drafter-quantization fp8"
        )
    wanted = architecture.features(raw, target.config, str(source))
    if target.feature_layers != wanted:
        raise ModelError(
            f"{source}: the drafter reads target layers {wanted}, the target gives "
            f"{target.feature_layers}; "
            "load the target with the drafter's feature layers"
        )
    for field, remedy in (
        (
            "hidden_size",
            "no other width is served: use a drafter trained for this target that is as wide",
        ),
        ("vocab_size", "use a drafter trained for this target"),
    ):
        found, expected = getattr(config, field), getattr(target, field)
        if found != expected:
            raise ModelError(
                f"{source}: {field!r} is {found}, the target's is {expected}; {remedy}"
            )
    least = 1 if architecture.own_head else config.vocab_size
    draft_vocab = raw.get("draft_vocab_size") or config.vocab_size
    if type(draft_vocab) is not int or not least <= draft_vocab <= config.vocab_size:
        raise ModelError(
            f"{source}: 'draft_vocab_size' is {draft_vocab!r}; expected {least} to "
            f"{config.vocab_size}"
        )
    files = tensor_files(directory)
    return Described(
        replace(config, max_position=target.max_position),
        draft_vocab,
        own_embedding=architecture.own_head and "embed_tokens.weight" in files,
        join_bias="fc.bias" in files,
        norm_before_residual=raw.get("norm_before_residual") is True,
    )


def fill_drafter(network: Fillable, directory: Path) -> None:
    """Fill the weights and the vocabulary map from a published checkpoint."""
    parameters, ignored = _published(network, directory)
    fill(parameters, directory, ignored=ignored)
    if not ARCHITECTURES[network.config.architecture].own_head:
        return
    files, vocab = tensor_files(directory), network.vocab_size
    count = network.draft_vocab_size
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


def check_drafter(network: Fillable, directory: Path) -> None:
    """Raise the errors of `fill_drafter` that the files' headers reveal. Reads no weight."""
    parameters, ignored = _published(network, directory)
    check_files(parameters, directory, ignored=ignored)


def _published(network: Fillable, directory: Path) -> tuple[dict[str, Stored], frozenset[str]]:
    """Return the network's tensors by the names in the directory's layout, and the names of file
    tensors to ignore.
    """
    layout, _ = read_layout(directory)
    parameters = {layout.published(name): view for name, view in network.parameters().items()}
    return parameters, ARCHITECTURES[network.config.architecture].vocabulary_map or COPIES


def refuse_own_embedding(own_embedding: bool) -> None:
    """Refuse a pushed embedding for a network without its own."""
    if own_embedding:
        raise ModelError(
            "the active drafter uses the target's embedding and head, and the push contains "
            "'embed_tokens.weight'; leave it out of the push"
        )


def map_tensor(name: str, tensor: Tensor, place: Path | str) -> Tensor:
    """Return a tensor of the vocabulary map in its stored dtype: `d2t` as int64, `t2d` as bool.
    Files may have any integer dtype. `ModelError` for another dtype or value.
    """
    kept = torch.int64 if name == "d2t" else torch.bool
    if tensor.dtype not in (kept, *INTEGERS):
        raise ModelError(
            f"{place}: tensor {name!r} has dtype {tensor.dtype}, expected {kept} or integers; "
            "convert the checkpoint"
        )
    converted = tensor.to(kept)
    if not torch.equal(converted.to(tensor.dtype), tensor):
        raise ModelError(
            f"{place}: tensor {name!r} of {tensor.dtype} has values other than 0 and 1; export the "
            "drafter again"
        )
    return converted


def target_ids(d2t_C: Tensor, t2d_V: Tensor, count: int, vocab: int, path: Path) -> Tensor:
    """Return the target id of each draft id, int64 [C], from a checkpoint's two tensors.
    `ModelError` if they disagree.
    """
    d2t_C, t2d_V = map_tensor("d2t", d2t_C, path), map_tensor("t2d", t2d_V, path)
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
