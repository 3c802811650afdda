"""The memory of a rank other than 0: models and saved pages, by the keys that rank 0 names them by,
and the pages themselves.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from tlt_client.channels.memory import GRANT
from tlt_server.engine.ranks.arena import Arena
from tlt_server.engine.ranks.orders import (
    Beat,
    Drop,
    FreePages,
    LoadShard,
    MapShard,
    MemoryOrder,
    ReclaimPages,
    Restore,
    Save,
    UnmapShard,
)
from tlt_server.errors import EngineFailed


class Pages(Protocol):
    def save(self, pages: list[int]) -> object: ...

    def restore(self, saved: Any, pages: list[int]) -> None: ...


class Freed(Protocol):
    def free(self) -> None: ...

    def reclaim(self) -> None: ...


class RankMemory:
    def __init__(
        self,
        side: socket.socket,
        make: Callable[[Any], Any],
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """`side`: where the memory of models comes from. `make`: makes a target, or the drafter of
        a target that it is given, in memory that rank 0 fills. `settle`: waits until nothing reads
        what is about to be freed.
        """
        self._side, self._make, self._settle = side, make, settle
        self.models: dict[int, Any] = {}
        self._arenas: dict[int, Arena] = {}
        self._saved: dict[int, object] = {}
        self.pages: Pages | None = None
        self.slept: Freed | None = None  # what a sleep takes, but models

    def follow(self, order: MemoryOrder) -> None:
        match order:
            case LoadShard(key, target):
                self._load(key, self.models[target] if target else None)
            case UnmapShard(key):
                self._settle()
                self._arenas[key].let_go()
            case MapShard(key):
                arena = self._received(key)
                self._arenas[key].move(arena)
                arena.close()
            case Drop(models, saved):
                self._drop(models, saved)
            case Save(key, pages):
                assert self.pages is not None
                self._saved[key] = self.pages.save(pages)
            case Restore(key, pages):
                assert self.pages is not None
                self.pages.restore(self._saved[key], pages)
            case FreePages():
                assert self.slept is not None
                self._settle()
                self.slept.free()
            case ReclaimPages():
                assert self.slept is not None
                self.slept.reclaim()
            case Beat():
                pass

    def _load(self, key: int, target: Any) -> None:
        arena = self._received(key)
        try:
            self.models[key] = arena.fill(partial(self._make, target))
        except BaseException:
            arena.free()
            raise
        finally:
            arena.close()
        self._arenas[key] = arena

    def _drop(self, models: list[int], saved: list[int]) -> None:
        if models:
            self._settle()
        for key in models:
            if key in self.models:  # else it could not be made
                del self.models[key]
                self._arenas.pop(key).free()
        for key in saved:
            del self._saved[key]

    def _received(self, key: int) -> Arena:
        """Map the memory of a model that rank 0 has sent. `EngineFailed` for that of another."""
        size = 8 + GRANT.size
        data, descriptors, _, _ = socket.recv_fds(self._side, size, 1, socket.MSG_WAITALL)
        if int.from_bytes(data[:8], "little") != key:
            raise EngineFailed(f"other memory came than that of model {key}")
        return Arena.opened(data[8:], descriptors)
