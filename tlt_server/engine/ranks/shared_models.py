"""Models that several ranks share: rank 0 builds the shards of all ranks, on memory that they map,
and frees and restores that memory when weights sleep and wake.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tlt_server.engine.ranks.arena import Arena
from tlt_server.engine.ranks.orders import LoadShard, MapShard, UnmapShard
from tlt_server.engine.ranks.ranks import Ranks
from tlt_server.models.split import Split


@dataclass(frozen=True)
class SharedSplit(Split):
    """Rank 0's split. Its models have the shards of all ranks, on memory that they map."""

    ranks: Ranks[Any] = field(kw_only=True)
    held: HeldShards | None = None

    @property
    def lent(self) -> HeldShards | None:
        """Return the memory that moves during a sleep."""
        return self.held if self.ranks.link.moves else None

    def build(self, make: Callable[[Split], Any], target: Any = None) -> Any:
        """Build a model. `target`: of a drafter."""
        _, *others = self.all
        own = replace(self, held=None)  # else one model might keep the memory of another
        models, arenas = list[Any](), list[Arena]()
        try:
            for split in (own, *others):
                given = split.leaves, split.rank, split.of, split.exchange, split.whole
                plain = Split(*given, split.token_block)
                arena = self.ranks.link.arena(split.rank, partial(make, plain))
                arenas += [arena] if arena and split.rank else []
                models.append(arena.fill(partial(make, split)) if arena else make(split))
        except Exception:  # memory may last for some ranks only
            for arena in arenas:
                arena.free()
            raise
        held = HeldShards(self.ranks, arenas)
        held.load(key_of(target) if target is not None else 0)
        first = models[0]
        first.split, first.peers = replace(self, held=held), tuple(models[1:])
        return first


def share(ranks: Ranks[Any], split: Split) -> SharedSplit:
    """Return rank 0's split, for models with the shards of all ranks."""
    given = split.leaves, 0, ranks.count, ranks.link.exchange, split.whole, split.token_block
    return SharedSplit(*given, ranks=ranks)


class HeldShards:
    """The memory of the workers' shards of one model. It lives as long as the model's storage,
    which models may swap.
    """

    def __init__(self, ranks: Ranks[Any], arenas: Sequence[Arena]) -> None:
        self._ranks, self._arenas, self.key = ranks, arenas, ranks.new_key()
        weakref.finalize(self, ranks.drop_model, self.key, arenas)

    def load(self, target: int) -> None:
        """Tell each rank to build its shard. `target`: see `LoadShard`."""
        self._ranks.hand_over(self._arenas, LoadShard(self.key, target))

    @property
    def contents(self) -> list[Tensor]:
        return [arena.content for arena in self._arenas]

    def free(self) -> None:
        """Free the memory on every rank. Nothing may read it before `reclaim`."""
        self._ranks.order(UnmapShard(self.key), wait=True)
        for arena in self._arenas:
            arena.let_go()

    def reclaim(self) -> None:
        """Allocate the memory again, with undefined content. If a rank is out of memory, all is
        freed again: `torch.OutOfMemoryError`.
        """
        try:
            for arena in self._arenas:
                arena.renew()
            self._ranks.hand_over(self._arenas, MapShard(self.key))
        except torch.OutOfMemoryError:
            self.free()
            raise


def key_of(model: Any) -> int:
    """Return the key of this model's storage in orders; 0 without workers."""
    split = getattr(model, "split", None)  # a registered drafter may have none
    return split.held.key if isinstance(split, SharedSplit) and split.held else 0
