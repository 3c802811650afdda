"""Memory of networks and folders of the spool that are not used any more, freed in threads, as this
takes a while.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from tlt_server.process.threads import Errands
from tlt_server.weights.parts import Changed, Network, let_go
from tlt_server.weights.spool import Spool


class Cleanup:
    def __init__(self, spool: Spool | None) -> None:
        self._spool = spool
        self._freeing = Errands("free weights")
        self._settling = Errands("settle spool") if spool is not None else self._freeing
        self._networks: list[Network] = []
        self._folders: list[list[Path]] = []  # a list for each commit

    @property
    def due(self) -> bool:
        """Return True if `run` has something to do."""
        return bool(self._networks or self._folders)

    def drop(self, networks: Iterable[Network]) -> None:
        self._networks += networks

    def drop_parts(self, parts: Changed) -> None:
        self.drop(part.network for part in parts.by_role.values())

    def discard(self, folders: list[Path]) -> None:
        """Remove folders, after making the spool's last rename durable."""
        self._folders.append(folders)

    def run(self, *, wait: bool = False) -> None:
        """Let go of what was dropped. Called between two steps, once what is live is installed.
        `wait`: until the memory is free.
        """
        if self._networks:
            self._freeing.give(partial(let_go, self._networks))
            self._networks = []
        for folders in self._folders:
            assert self._spool is not None
            self._settling.give(partial(self._spool.settle, folders))
        self._folders.clear()
        if wait:
            self._freeing.mark().wait()

    def ends(self) -> list[threading.Event]:
        """Return events that are set once all that was given until now is done."""
        return [self._freeing.mark(), self._settling.mark()]
