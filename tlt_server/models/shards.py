"""The shards of a target: each rank's slice of each checkpoint tensor.

`RULES` is the table; `cut` reads it for one rank. `SpreadTensor` is a checkpoint's tensor whose
slices lie on several ranks: loads and pushes write through it, and its checksum is that of the
whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tlt_server.errors import StartupError
from tlt_server.models.config import ModelConfig
from tlt_server.models.split import Split, divides
from tlt_server.settings.server import SPLITS


class ShardCut(NamedTuple):
    """The slice [start, stop) along `dim` of a checkpoint's tensor."""

    dim: int
    start: int
    stop: int


class Rule(NamedTuple):
    dim: int
    span: Callable[[ModelConfig, Split], tuple[int, int]]


def _heads(config: ModelConfig, split: Split) -> tuple[int, int]:
    width = config.heads * config.head_dim // split.of
    return split.rank * width, (split.rank + 1) * width


def _kv_heads(config: ModelConfig, split: Split) -> tuple[int, int]:
    """Return the rank's range of KV heads. If there are fewer heads than ranks, several ranks share
    one.
    """
    count = kv_heads(config, split)
    first = split.rank * config.kv_heads // split.of
    return first * config.head_dim, (first + count) * config.head_dim


def _intermediate(config: ModelConfig, split: Split) -> tuple[int, int]:
    width = config.intermediate_size // split.of
    return split.rank * width, (split.rank + 1) * width


def _vocabulary(config: ModelConfig, split: Split) -> tuple[int, int]:
    own, size = most_tokens(config, split), config.vocab_size
    return min(own * split.rank, size), min(own * (split.rank + 1), size)


# The end of a tensor's name, without `.weight` or `.bias` -> its rule. Others are on every rank,
# and so are biases of what is cut along its inputs.
RULES: dict[str, Rule] = {
    "q_proj": Rule(0, _heads),
    "k_proj": Rule(0, _kv_heads),
    "v_proj": Rule(0, _kv_heads),
    "o_proj": Rule(1, _heads),
    "gate_proj": Rule(0, _intermediate),
    "up_proj": Rule(0, _intermediate),
    "down_proj": Rule(1, _intermediate),
    "lm_head": Rule(0, _vocabulary),
}


def cut(name: str, config: ModelConfig, split: Split) -> ShardCut | None:
    """Return the rank's slice of a tensor; None: the whole tensor."""
    if split.of == 1:
        return None
    *_, layer, kind = name.split(".")
    rule = RULES.get(layer)
    if rule is None or (rule.dim == 1 and kind == "bias") or layer in split.whole:
        return None
    return ShardCut(rule.dim, *rule.span(config, split))


def rank_config(config: ModelConfig, split: Split) -> ModelConfig:
    """Return the shape of a rank's layers; for a whole target, `config` itself."""
    if split.of == 1:
        return config
    return replace(
        config,
        heads=config.heads // split.of,
        kv_heads=kv_heads(config, split),
        intermediate_size=config.intermediate_size // split.of,
    )


def kv_heads(config: ModelConfig, split: Split) -> int:
    return max(1, config.kv_heads // split.of)


def vocabulary(config: ModelConfig, split: Split) -> tuple[int, int]:
    """Return the rank's range of token ids."""
    return _vocabulary(config, split)


def most_tokens(config: ModelConfig, split: Split) -> int:
    """Return the number of tokens of every rank but the last, which may have fewer."""
    blocks = -(-config.vocab_size // split.token_block)
    return split.token_block * -(-blocks // split.of)


def has_tokens(config: ModelConfig, split: Split) -> bool:
    """Return True if the last rank has any tokens."""
    return config.vocab_size > most_tokens(config, split) * (split.of - 1)


def widths(config: ModelConfig, unit: int) -> list[int]:
    """Return the numbers of ranks that can share this model; `unit`: see `check_leaves`."""
    return [
        width
        for width in SPLITS
        if (width == 1 or divides(config, width, unit))
        and (config.kv_heads % width == 0 or width % config.kv_heads == 0)
        and has_tokens(config, Split(of=width))
    ]


def check_ranks(config: ModelConfig, ranks: int, unit: int, where: str) -> None:
    """Raise `StartupError`, with the possible widths, if this is not one of them."""
    works = widths(config, unit)
    if ranks not in works:
        raise StartupError(
            f"tensor_parallel is {ranks}, and {where} has {config.heads} heads, {config.kv_heads} "
            f"KV heads, an MLP of {config.intermediate_size} and {config.vocab_size} tokens: every "
            f"rank has as many whole heads, and a multiple of {unit} inputs of attention output "
            f"and of MLP down; use {' or '.join(map(str, works))}"
        )


class SpreadTensor:
    """A checkpoint's tensor as slices on the ranks, in rank order. Replicated slices are equal."""

    def __init__(self, pieces: Sequence[Tensor], cuts: Sequence[ShardCut | None]) -> None:
        self.pieces, self.cuts = pieces, cuts
        first = pieces[0]
        self.dtype, self.device, self.is_cuda = first.dtype, first.device, first.is_cuda
        sizes = list(first.shape)
        if cuts[0] is not None:
            sizes[cuts[0].dim] = max(cut.stop for cut in cuts if cut is not None)
        self.shape = torch.Size(sizes)

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def numel(self) -> int:
        return self.shape.numel()

    def dim(self) -> int:
        return len(self.shape)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def copy_(self, values: Tensor) -> None:
        for piece, cut in zip(self.pieces, self.cuts, strict=True):
            piece.copy_(values if cut is None else values.narrow(cut.dim, *_length(cut)))

    def whole(self) -> Tensor:
        """Return a copy of the whole tensor."""
        made = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for piece, cut in zip(self.pieces, self.cuts, strict=True):
            (made if cut is None else made.narrow(cut.dim, *_length(cut))).copy_(piece)
        return made

    def placed(self) -> Iterator[tuple[Tensor, int, int]]:
        """Yield each rank's slice as [rows, columns], the index of its first element in the whole
        tensor, and the distance of two rows there.
        """
        columns = 1 if self.dim() == 1 else self.shape[1:].numel()
        for piece, cut in zip(self.pieces, self.cuts, strict=True):
            first = 0 if cut is None else cut.start * (columns if cut.dim == 0 else 1)
            yield piece.reshape(len(piece), -1), first, columns


Stored = Tensor | SpreadTensor


def tensors_of(stored: Stored) -> Sequence[Tensor]:
    return stored.pieces if isinstance(stored, SpreadTensor) else (stored,)


def whole(stored: Stored) -> Tensor:
    return stored.whole() if isinstance(stored, SpreadTensor) else stored


def pieces_of(
    shards: Sequence[Mapping[str, Tensor]], config: ModelConfig, splits: Sequence[Split]
) -> dict[str, Stored]:
    """Return the checkpoint's tensors, from the parameters of every rank's shard."""
    return {
        name: SpreadTensor(
            [shard[name] for shard in shards], [cut(name, config, split) for split in splits]
        )
        for name in shards[0]
    }


def values_of(parameters: Mapping[str, Stored], config: ModelConfig, split: Split) -> int:
    """Return the number of elements of a model's tensors on a rank."""
    total = 0
    for name, stored in parameters.items():
        own, sizes = cut(name, config, split), list(stored.shape)
        if own is not None:
            sizes[own.dim] = own.stop - own.start
        total += torch.Size(sizes).numel()
    return total


def _length(cut: ShardCut) -> tuple[int, int]:
    return cut.start, cut.stop - cut.start
