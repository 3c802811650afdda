"""The shards of a target: each rank's slice of each checkpoint tensor.

`DIMS` is the table of dimensions that ranks divide. `SpreadTensor` is a checkpoint's tensor whose
slices lie on several ranks: loads and pushes write through it, and its checksum is that of the
whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tlt_client.quantise import BLOCK, QuantisedBlocks, effective, quantise
from tlt_server.errors import StartupError
from tlt_server.models.config import ModelConfig
from tlt_server.models.quantised import QuantisedTensor
from tlt_server.models.split import Split, divides
from tlt_server.settings.server import SPLITS

# The end of a tensor's name, without `.weight` or `.bias` -> the dimension that ranks divide.
# Others are on every rank, and so are biases of what is divided along its inputs.
DIMS = {
    "q_proj": 0,
    "k_proj": 0,
    "v_proj": 0,
    "o_proj": 1,
    "gate_proj": 0,
    "up_proj": 0,
    "down_proj": 1,
    "lm_head": 0,
}
KV = ("k_proj", "v_proj")


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
    own, size = most_tokens(config, split), config.vocab_size
    return min(own * split.rank, size), min(own * (split.rank + 1), size)


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
        and (width == 1 or whole_blocks(config, width))
    ]


def whole_blocks(config: ModelConfig, width: int) -> bool:
    """Return False if slices of keys and values would cut a block of FP8."""
    own = kv_heads(config, Split(of=width)) * config.head_dim
    return config.quantization is None or own % BLOCK == 0


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
    """A checkpoint's tensor as slices on the ranks, in rank order: along `dim`, or all of it on
    each rank if that is None. `same` neighbours hold equal slices.
    """

    def __init__(
        self, pieces: Sequence[Tensor | QuantisedTensor], dim: int | None, same: int = 1
    ) -> None:
        self.pieces, self._dim = pieces, dim
        first = pieces[0]
        self.dtype, self.device, self.is_cuda = first.dtype, first.device, first.is_cuda
        sizes = list(first.shape)
        self.starts = [0] * len(pieces)  # where each slice begins
        if dim is not None:
            lengths = [piece.shape[dim] for piece in pieces]
            ends = [0, *accumulate(lengths[::same])]
            self.starts = [ends[rank // same] for rank in range(len(pieces))]
            sizes[dim] = ends[-1]
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

    def copy_(self, values: Tensor | QuantisedBlocks) -> None:
        for piece, part in zip(self.pieces, self._parts(values), strict=True):
            piece.copy_(part)

    def whole(self) -> Tensor:
        """Return a copy of the whole tensor."""
        made = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for piece, part in zip(self.pieces, self._parts(made), strict=True):
            part.copy_(whole(piece))
        return made

    def _parts(self, values: Any) -> Iterator[Any]:
        """Yield the views of the whole tensor that the ranks hold."""
        for start, piece in zip(self.starts, self.pieces, strict=True):
            dim = self._dim
            yield values if dim is None else values.narrow(dim, start, piece.shape[dim])

    def placed(self) -> Iterator[tuple[Tensor, int, int]]:
        """Yield each rank's slice as [rows, columns], the index of its first element in the whole
        tensor, and the distance of two rows there.
        """
        columns = 1 if self.dim() == 1 else self.shape[1:].numel()
        for start, piece in zip(self.starts, self.pieces, strict=True):
            yield (
                whole(piece).reshape(len(piece), -1),
                start * (1 if self._dim else columns),
                columns,
            )


class OriginalTensor:
    """A drafter's tensor of which the network keeps FP8, and the host what was loaded or pushed:
    checksums, exports and training are those of a server without FP8.
    """

    def __init__(
        self,
        stored: QuantisedTensor | SpreadTensor,
        dtype: torch.dtype,
        name: str,
        originals: dict[str, Tensor],
    ) -> None:
        """dtype: the drafter's without FP8. `originals`: of the network, by name."""
        self.dtype, self.stored, self._name, self._originals = dtype, stored, name, originals
        self.shape: torch.Size = stored.shape
        self.device: torch.device = stored.device
        self.is_cuda: bool = stored.is_cuda

    @property
    def tensors(self) -> Sequence[Tensor]:
        return tensors_of(self.stored)

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes

    def numel(self) -> int:
        return self.shape.numel()

    def dim(self) -> int:
        return len(self.shape)

    def is_floating_point(self) -> bool:
        return True

    def copy_(self, values: Tensor) -> None:
        values = values.to(self.dtype)
        self.stored.copy_(values)
        self._originals[self._name] = torch.empty(self.shape, dtype=self.dtype).copy_(values)

    def whole(self) -> Tensor:
        """Return the original."""
        return self._originals[self._name]

    def checked(self) -> Tensor:
        """Return the original if the network computes with it, else the network's weights."""
        original, live = self.whole(), whole(self.stored)
        wanted = effective(quantise(original.to(live.device)))
        return original if torch.equal(wanted, live.to(wanted.dtype)) else live


Stored = Tensor | QuantisedTensor | SpreadTensor | OriginalTensor


def first_piece(stored: Stored) -> Tensor | QuantisedTensor:
    """Return the slice of the first rank, which is all of it with one rank."""
    inner = stored.stored if isinstance(stored, OriginalTensor) else stored
    return inner.pieces[0] if isinstance(inner, SpreadTensor) else inner


def all_tensors(parameters: Mapping[str, Stored]) -> list[Tensor]:
    """Return the tensors that hold a model's parameters."""
    return [tensor for stored in parameters.values() for tensor in tensors_of(stored)]


def tensors_of(stored: Stored) -> Sequence[Tensor]:
    """Return the tensors that hold it: its slices, and of FP8 values and scales."""
    if isinstance(stored, SpreadTensor):
        return [tensor for piece in stored.pieces for tensor in tensors_of(piece)]
    return (stored,) if isinstance(stored, Tensor) else stored.tensors


def in_fp8(stored: Stored) -> bool:
    first = stored.pieces[0] if isinstance(stored, SpreadTensor) else stored
    return isinstance(first, QuantisedTensor)


def whole(stored: Stored) -> Tensor:
    """Return the whole tensor; of FP8, its effective weights."""
    return stored if isinstance(stored, Tensor) else stored.whole()


def pieces_of(
    shards: Sequence[Mapping[str, Tensor | QuantisedTensor]],
    config: ModelConfig,
    splits: Sequence[Split],
) -> dict[str, Stored]:
    """Return the checkpoint's tensors, from the parameters of every rank's shard; of one shard, its
    own.
    """
    split, made = splits[0], dict[str, Stored]()
    if len(shards) == 1:
        return {**shards[0]}
    for name in shards[0]:
        *_, layer, kind = name.split(".")
        dim = None if split.of == 1 or layer in split.whole else DIMS.get(layer)
        if dim == 1 and kind == "bias":
            dim = None
        same = max(1, split.of // config.kv_heads) if layer in KV else 1
        made[name] = SpreadTensor([shard[name] for shard in shards], dim, same)
    return made


def with_originals(
    parameters: Mapping[str, Any], dtype: torch.dtype, originals: dict[str, Tensor]
) -> dict[str, Stored]:
    """Return a drafter's tensors, of which those in FP8 keep their originals. dtype: the drafter's
    without FP8.
    """
    made = dict[str, Stored]()
    for name, stored in parameters.items():
        made[name] = OriginalTensor(stored, dtype, name, originals) if in_fp8(stored) else stored
    return made


def stored_bytes(parameters: Mapping[str, Stored]) -> int:
    """Return the memory of a model's tensors, on all ranks."""
    return sum(stored.nbytes for stored in parameters.values())
