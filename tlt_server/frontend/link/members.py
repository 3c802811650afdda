"""The table of a fleet: its replicas, and those of them that can run sequences."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator

import msgspec

from tlt_client.wire import ReplicaState
from tlt_server.frontend.link.launching import ReplicaAddress
from tlt_server.frontend.link.placing import Placer
from tlt_server.frontend.link.replica import Replica, Replicas
from tlt_server.wire.records import Cycle, GenerateRequest


class FleetReplicas(Replicas):
    """The replicas of a fleet that can run sequences."""

    resume = True

    def __init__(self, share: Callable[[], float]) -> None:
        """`share`: of max_tokens that a sequence is expected to use; 0: unknown."""
        super().__init__()
        self.placer, self._share = Placer(), share
        self.ready: dict[str, Member] = {}
        self.wanted: Callable[[], None] = lambda: None  # called if a sequence finds no replica
        self.commits: Callable[[], bool] = lambda: False  # what is placed then waits for the end

    def __iter__(self) -> Iterator[Replica]:
        yield from self.ready.values()

    @property
    def count(self) -> int:
        return len(self.placer.loads)

    def place(
        self, request: GenerateRequest, tokens: int = 0, at: Replica | None = None
    ) -> Replica | None:
        if not self.ready:
            self.wanted()
        if self.commits() or not self.ready:
            return None
        among: Collection[str] = self.ready.keys()
        if at is not None and at.name in self.ready:
            among = {at.name}
        name = self.placer.place(request, tokens, self._share(), among)
        return self.ready[name] if name is not None else None

    def together(self, cycle: Cycle) -> Cycle:
        """Return a step of all replicas, if their steps are like this one."""
        count = max(1, len(self.ready))
        decoding = cycle.context.decoding * count
        return msgspec.structs.replace(
            cycle,
            step_s=cycle.step_s / count,
            context=msgspec.structs.replace(cycle.context, decoding=decoding),
        )

    def took(self, id: str, tokens: int) -> None:
        self.placer.took(id, tokens)

    def ended(self, id: str) -> None:
        self.placer.ended(id)


class Member(Replica):
    """One replica in the fleet's table."""

    def __init__(self, address: ReplicaAddress) -> None:
        super().__init__(address.name)
        self.address = address
        self.state: ReplicaState = "joining"
        self.fault = ""  # why it was last lost or refused
        self.is_held = False  # by another gateway, for which it refused this one
        self.moves = 0  # sequences that were moved away
        self.drained = False  # an operator wants nothing placed there
        self.task: asyncio.Task[None] | None = None  # runs the link
        self.joining: asyncio.Task[None] | None = None
