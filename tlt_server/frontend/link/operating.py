"""Orders of operators to a fleet: drain, resume, restart and number of replicas; and its moves."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Never

import structlog

from tlt_client.wire import ReplicaStatus
from tlt_server.errors import Conflict, TltError
from tlt_server.frontend.link.client import EngineClient
from tlt_server.frontend.link.fleet import Fleet
from tlt_server.frontend.link.launching import Launcher
from tlt_server.frontend.link.members import FleetReplicas, Member
from tlt_server.frontend.link.moving import Mover
from tlt_server.frontend.link.replica import Replica
from tlt_server.frontend.link.submission import Route
from tlt_server.metrics.fleet import FleetMetrics, MoveReason

MOVES_S = 1.0  # between two looks at what should move
EMPTY_S = 0.05  # between two looks at whether a replica is empty

log = structlog.get_logger()


class FleetOperations:
    def __init__(
        self,
        client: EngineClient,
        fleet: Fleet,
        replicas: FleetReplicas,
        launcher: Launcher,
        metrics: FleetMetrics,
        mover: Mover,
    ) -> None:
        self._client, self._fleet, self._mover = client, fleet, mover
        self._replicas, self._launcher, self._metrics = replicas, launcher, metrics
        client.fleet = self
        metrics.watch(self.status)

    async def run(self) -> Never:
        """Move sequences between replicas where that pays, until cancelled."""
        while True:
            await asyncio.sleep(MOVES_S)
            with self._client.faults.containing("the moves of sequences"):
                self.rearrange(time.monotonic())

    def rearrange(self, now_s: float) -> None:
        """Make the moves that pay now."""
        routes = self._client.sequences.routes
        if len(self._replicas.placer.loads) < 2 or not routes or self._replicas.commits():
            return
        closed = self._replicas.placer.loads.keys() - self._replicas.ready.keys()
        fixed = [id for id, route in routes.items() if not self.may_move(route)]
        groups = defaultdict[tuple[str, MoveReason], list[Route]](list)
        for move in self._mover.moves(now_s, closed, fixed):
            groups[move.to, move.reason].append(routes[move.id])
        for (to, reason), moved in groups.items():
            self._move(moved, reason, self._replicas.ready[to])

    def status(self) -> list[ReplicaStatus]:
        return [self._status(member) for member in self._fleet.members.values()]

    def _status(self, member: Member) -> ReplicaStatus:
        info, load = member.info, self._replicas.placer.loads.get(member.name)
        versions = {}
        if info is not None:
            versions = {"target": info.weight_version, "drafter": info.drafter_version}
        return ReplicaStatus(
            name=member.name,
            state=member.state,
            address=member.address.link,
            url=member.url,
            versions={role: version for role, version in versions.items() if version},
            running=int(member.gauges.get("running", 0)),
            waiting=int(member.gauges.get("waiting", 0)),
            expected_wait_s=round(load.figures()[0], 3) if load is not None else 0.0,
            moves=member.moves,
            fault=member.fault,
        )

    async def drain(self, name: str) -> None:
        """Place nothing there any more, and move its sequences. `Conflict` for the last one."""
        member = self._fleet.member(name)
        if member.state == "draining":
            return
        if member.state == "asleep":
            await self._fleet.rouse()
        if member.state != "ready":
            raise Conflict(f"the replica {name} is {member.state}, so there is nothing to drain")
        if len(self._replicas.ready) == 1:
            raise Conflict(f"{name} is the last replica that is ready; add another one first")
        member.state, member.drained = "draining", True
        del self._replicas.ready[name]
        routes = self._client.sequences.at(member)
        self._move([route for route in routes if self.may_move(route)], "drained")
        self._fleet.tell()

    def _move(self, routes: list[Route], reason: MoveReason, to: Replica | None = None) -> None:
        for route in routes:
            self._metrics.moved(reason, 0 if route.held else route.size)
            if isinstance(route.replica, Member):
                route.replica.moves += 1
        self._client.sequences.where.move(routes, to)

    def may_move(self, route: Route) -> bool:
        """Return True if all tokens of a sequence are of the live weights, so that it gives the
        same ones elsewhere.
        """
        live = self._replicas.whole.info.weight_version if self._replicas.whole.info else ""
        same = not route.version or route.version.partition("+")[0] == live
        stays = route.mixed or route.ending or route.on_trial or self._replicas.commits()
        return same and not stays

    def resume(self, name: str) -> None:
        """Use a drained replica again."""
        member = self._fleet.member(name)
        member.drained = False
        if member.state == "draining":
            self._fleet.use(member)

    async def restart(self, name: str) -> None:
        """Drain a replica, wait until it is empty, and start it again. `Conflict` for the last
        one, and where the fleet starts none; then it is used as before.
        """
        await self._end(name, self._launcher.restart)
        self._fleet.member(name).drained = False

    async def _end(self, name: str, end: Callable[[str], Awaitable[None]]) -> None:
        """Drain a replica, and end it once it is empty; if that is refused, use it again."""
        member = self._fleet.member(name)
        if member.state == "ready":
            await self.drain(name)
        try:
            await self._empty(member)
            await end(name)
        except BaseException:
            self.resume(name)
            raise

    async def _empty(self, member: Member) -> None:
        while self._client.sequences.at(member):  # noqa: ASYNC110 (a rare order)
            await asyncio.sleep(EMPTY_S)

    async def scale(self, replicas: int) -> None:
        """Start or stop replicas until there are that many: those that are not ready go first, then
        the idlest and newest. Each that stops is drained.
        """
        for _ in range(replicas - len(self._fleet.members)):
            await self._launcher.start()
        newest = reversed(self.status())
        excess = sorted(
            newest, key=lambda each: (each.state == "ready", each.running + each.waiting)
        )
        for status in excess[: max(0, len(self._fleet.members) - replicas)]:
            self._fleet.do(self._stop(status.name))

    async def _stop(self, name: str) -> None:
        try:
            await self._end(name, self._launcher.stop)
        except TltError as error:
            log.error("replica_not_stopped", name=name, reason=error.message)
