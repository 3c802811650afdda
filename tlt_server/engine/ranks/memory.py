"""The memory of a worker rank: models and saved pages, by the keys in rank 0's orders."""

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
    RankOrder,
    ReclaimPages,
    Restore,
    Save,
    UnmapShard,
)
from tlt_server.errors import EngineFailed

# How a rank follows each kind of order, and the text of its answer, if it has one.
Handlers = dict[type[RankOrder], Callable[[Any], str | None]]


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
        """`side`: the socket that brings the memory of models. `make`: creates a target, or the
        drafter of a given target, in memory that rank 0 fills. `settle`: waits until nothing reads
        memory that is about to be freed.
        """
        self._side, self._make, self._settle = side, make, settle
        self.models: dict[int, Any] = {}
        self._arenas: dict[int, Arena] = {}
        self._saved: dict[int, object] = {}
        self.handlers: Handlers = {
            LoadShard: self._load,
            UnmapShard: self._unmap,
            MapShard: self._map,
            Drop: self._drop,
            Beat: lambda order: None,
        }

    def handlers_of(self, pages: Pages, slept: Freed) -> Handlers:
        """Return the handlers of orders about these pages. `slept`: everything that a sleep frees,
        except models.
        """

        def save(order: Save) -> None:
            self._saved[order.key] = pages.save(order.pages)

        def restore(order: Restore) -> None:
            pages.restore(self._saved[order.key], order.pages)

        def free(order: FreePages) -> None:
            self._settle()
            slept.free()

        def reclaim(order: ReclaimPages) -> None:
            slept.reclaim()

        return {Save: save, Restore: restore, FreePages: free, ReclaimPages: reclaim}

    def _load(self, order: LoadShard) -> None:
        arena = self._received(order.key)
        try:
            target = self.models[order.target] if order.target else None
            self.models[order.key] = arena.fill(partial(self._make, target))
        except BaseException:
            arena.free()
            raise
        finally:
            arena.close()
        self._arenas[order.key] = arena

    def _unmap(self, order: UnmapShard) -> None:
        self._settle()
        self._arenas[order.key].let_go()

    def _map(self, order: MapShard) -> None:
        arena = self._received(order.key)
        self._arenas[order.key].move(arena)
        arena.close()

    def _drop(self, order: Drop) -> None:
        if order.models:
            self._settle()
        for key in order.models:
            if key in self.models:  # else it could not be made
                del self.models[key]
                self._arenas.pop(key).free()
        for key in order.saved:
            del self._saved[key]

    def _received(self, key: int) -> Arena:
        """Map the memory of a model that rank 0 has sent. `EngineFailed` if it belongs to another
        model.
        """
        size = 8 + GRANT.size
        data, descriptors, _, _ = socket.recv_fds(self._side, size, 1, socket.MSG_WAITALL)
        if int.from_bytes(data[:8], "little") != key:
            raise EngineFailed(f"the memory received is not that of model {key}")
        return Arena.opened(data[8:], descriptors)
