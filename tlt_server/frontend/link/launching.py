"""The seam between a fleet's gateway and what starts its replicas: where they are, and orders to
start, stop and restart them.

`tlt_server.fleet.launchers` implements it; `frontend/link/fleet.py` keeps a link to every address.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

MAX_REPLICAS = 1024


class ReplicaAddress(NamedTuple):
    """The place where a replica is reached."""

    name: str  # unique, the same after a restart, safe in a path and as a label
    link: str  # host:port of its link; empty while it has none
    place: str = ""  # for people: its GPUs or its node
    fault: str = ""  # how its last process ended and when the next one starts


class Launcher(Protocol):
    """A starter of replicas, or one that only knows where they are."""

    def check(self, more: int = 0) -> None:
        """Refuse with `Conflict`, before an order, if nothing can be started or ended here, or not
        that many replicas more.
        """

    async def run(self, found: Callable[[Sequence[ReplicaAddress]], None]) -> None:
        """Keep the replicas running until cancelled, then end what was started. Call `found` with
        all addresses at the beginning and after each change. `StartupError`: it can never work.
        """

    async def start(self) -> str:
        """Start one more replica and return its name. `Conflict` as of `check`."""

    async def stop(self, name: str) -> None:
        """End a replica for good; the caller drains it before."""

    async def restart(self, name: str) -> None:
        """End a replica and start it again at once."""
