"""The table of a fleet: its replicas, and those of them that can run sequences."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

import msgspec

from tlt_client.wire import ReplicaState
from tlt_server.errors import TltError
from tlt_server.frontend.link.launching import ReplicaAddress
from tlt_server.frontend.link.placing import Placer
from tlt_server.frontend.link.replica import Replica, Replicas
from tlt_server.wire.commands import ControlCommand, SetPolicy, WeightCommand
from tlt_server.wire.events import ControlReport, WeightReport
from tlt_server.wire.records import Cycle, GenerateRequest


class ReplicaLink(Protocol):
    """The link to one replica, for as long as it runs."""

    url: str  # the HTTP address of the replica, once attached
    refusal: TltError | None  # why the replica ended the last stream

    async def run(self) -> None: ...


class Orders(Protocol):
    """The way of orders to every replica."""

    async def weights(self, command: WeightCommand) -> WeightReport: ...

    async def control(self, command: ControlCommand | SetPolicy) -> ControlReport: ...

    async def catch_up(self, replica: Replica) -> None:
        """Return when the replica has what is committed now."""
        ...


class FleetReplicas(Replicas):
    """The replicas of a fleet that can run sequences."""

    resume = True

    def __init__(self, share: Callable[[], float]) -> None:
        """`share`: of max_tokens that a sequence is expected to use; 0: unknown."""
        super().__init__()
        self.placer, self._share = Placer(), share
        self.ready: dict[str, Replica] = {}
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
        among: Collection[str] | None = (
            None if len(self.ready) == len(self.placer.loads) else self.ready.keys()
        )
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


class Member:
    """One replica in the fleet's table."""

    def __init__(self, address: ReplicaAddress) -> None:
        self.address, self.replica = address, Replica(address.name)
        self.state: ReplicaState = "joining"
        self.fault = ""  # why it was last lost or refused
        self.moves = 0  # sequences that were moved away
        self.drained = False  # an operator wants nothing placed there
        self.link: ReplicaLink | None = None
        self.task: asyncio.Task[None] | None = None  # runs the link
        self.joining: asyncio.Task[None] | None = None
