"""The split of a target: the reduction segments of its long sums, and the ranks that share them.

The inputs of a row-parallel matmul (attention output, MLP down) are cut into equal segments, called
*leaves*. Each leaf is one matmul; leaves add up as a fixed binary tree, then the bias is added,
then the residual. A rank has neighbouring leaves, and an exchange adds the tree's upper levels. So
the same additions are made at every width, and bits depend only on the number of leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from tlt_server.errors import StartupError
from tlt_server.models.config import ModelConfig
from tlt_server.settings.server import SPLITS

GPU_LEAVES = 2
# One GPU is as fast with these (see `tlt bench gemm`), and two are faster.
AUTO_GPU_LEAVES = 4
CPU_LEAF_UNIT, GPU_LEAF_UNIT = 8, 128  # inputs of a leaf are a multiple


def folded(parts: Sequence[Tensor]) -> Tensor:
    """Add neighbours as a binary tree, `((p0 + p1) + (p2 + p3)) + ...`. The number of parts is a
    power of two.
    """
    while len(parts) > 1:
        parts = [
            left + right for left, right in zip(parts[::2], parts[1::2], strict=True)
        ]  # each node is rounded once
    return parts[0]


class RankExchange(Protocol):
    """Messages between the ranks of one target; every rank makes the same calls in order."""

    def add(self, part_RX: Tensor) -> Tensor:
        """Return the tree's root: `folded` over the parts of all ranks."""

    def join(self, part_RX: Tensor, widths: Sequence[int], check: int) -> Tensor:
        """Return the columns of all ranks side by side: [R, sum of widths]. `check`: a 64-bit
        number that must be equal on all ranks, else `EngineFailed`.
        """


class Alone:
    """The exchange of a target that one process computes."""

    def add(self, part_RX: Tensor) -> Tensor:
        return part_RX

    def join(self, part_RX: Tensor, widths: Sequence[int], check: int) -> Tensor:
        return part_RX


@dataclass(frozen=True)
class Split:
    """The part of a target that one process computes."""

    leaves: int = 1  # slices of each row-parallel matmul, over all ranks
    rank: int = 0
    of: int = 1  # ranks
    exchange: RankExchange = Alone()
    whole: tuple[str, ...] = ()  # layers that every rank has whole
    token_block: int = 16  # tokens; a rank has whole blocks of the head

    @property
    def all(self) -> list[Split]:
        """Return the splits of all ranks, in order."""
        return [
            Split(self.leaves, rank, self.of, whole=self.whole, token_block=self.token_block)
            for rank in range(self.of)
        ]

    @property
    def lent(self) -> Any:
        """Return the memory of the workers' shards, which they free and reclaim together
        (`weights.dormant.SleepingMemory`). None if this process has it, or without workers.
        """
        return None

    def build(self, make: Callable[[Split], Any], target: Any = None) -> Any:
        """Return the object that `make` builds, with storage for all tensors that this process
        writes. `target`: of a drafter.
        """
        return make(self)


WHOLE = Split()


def check_leaves(config: ModelConfig, leaves: int, unit: int, where: str, ranks: int = 1) -> None:
    """Raise `StartupError` if leaves would cut a head, have a number of inputs that is not a
    multiple of `unit`, or be unequal in number on the ranks. The error lists the numbers that work.
    """
    works = [count for count in SPLITS if count >= ranks and divides(config, count, unit)]
    if leaves not in works:
        raise StartupError(
            f"reduction_leaves is {leaves} and tensor_parallel {ranks}, and {where} has "
            f"{config.heads} heads of {config.head_dim} and an MLP of {config.intermediate_size}: "
            f"every rank has as many leaves, each of whole heads and a multiple of {unit}; use "
            f"{' or '.join(map(str, works)) or 'reduction_leaves auto'}"
        )


def divides(config: ModelConfig, leaves: int, unit: int) -> bool:
    """Return True if each of `leaves` has whole heads, and a multiple of `unit` inputs."""
    width = config.heads * config.head_dim
    sizes = (width, config.intermediate_size)
    return config.heads % leaves == 0 and all(size % (leaves * unit) == 0 for size in sizes)


def auto_gpu_leaves(config: ModelConfig, ranks: int = 1) -> int:
    """Return the number of leaves of a target on GPUs, if settings name none."""
    least = max(GPU_LEAVES, ranks)
    counts = [n for n in SPLITS if least <= n <= AUTO_GPU_LEAVES]
    return max((n for n in counts if divides(config, n, GPU_LEAF_UNIT)), default=least)
