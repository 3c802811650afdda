"""Orders of operators to a fleet: drain, resume, restart and number of replicas; and its moves."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import Never

import structlog

from tlt_client.wire import ReplicaStatus
from tlt_server.errors import Conflict, TltError
from tlt_server.frontend.link.fleet import Fleet
from tlt_server.frontend.link.members import Member
from tlt_server.frontend.link.moving import Mover
from tlt_server.frontend.link.submission import Route
from tlt_server.metrics.fleet import MoveReason

MOVES_S = 1.0  # between two looks at what should move
EMPTY_S = 0.05  # between two looks at whether a replica is empty

log = structlog.get_logger()


class FleetOperations:
    def __init__(self, fleet: Fleet, mover: Mover) -> None:
        self._fleet, self._replicas, self._mover = fleet, fleet.replicas, mover
        self._client, self._launcher = fleet.client, fleet.launcher
        fleet.client.fleet = self
        fleet.metrics.watch(self.status)

    async def run(self) -> Never:
        """Move sequences between replicas where that pays, until cancelled."""
        while True:
            await asyncio.sleep(MOVES_S)
            with self._client.faults.containing("the moves of sequences"):
                self.rearrange(time.monotonic())

    def rearrange(self, now_s: float) -> None:
        """Make the moves that pay now, and empty drained replicas."""
        if self._fleet.is_committing or not self._replicas.placer.loads:
            return
        for member in self._replicas.members.values():
            if member.state == "draining" and member.sequences:
                self._empty(member)
        routes = self._client.sequences.routes
        groups = defaultdict[tuple[str, MoveReason], list[Route]](list)
        for move in self._mover.moves(now_s, lambda id: self.may_move(routes[id])):
            groups[move.to, move.reason].append(routes[move.id])
        for (to, reason), moved in groups.items():
            self._move(moved, reason, self._replicas.member(to))

    def _empty(self, member: Member) -> None:
        routes = self._client.sequences.at(member)
        self._move([route for route in routes if self.may_move(route)], "drained")

    def _move(self, routes: list[Route], reason: MoveReason, to: Member | None = None) -> None:
        for route in routes:
            self._fleet.metrics.moved(reason, 0 if route.held else route.size)
            if isinstance(route.replica, Member):
                route.replica.moves += 1
        self._client.sequences.where.move(routes, to)

    def may_move(self, route: Route) -> bool:
        """Return True if all tokens of a sequence are of the live weights, so that it gives the
        same ones elsewhere.
        """
        live = self._client.info.weight_version if self._client.info else ""
        same = not route.version or route.version.partition("+")[0] == live
        stays = route.mixed or route.ending or route.on_trial or self._fleet.is_committing
        return same and not stays

    def status(self) -> list[ReplicaStatus]:
        return [_status(member) for member in self._replicas.members.values()]

    async def drain(self, name: str) -> None:
        """Place nothing there any more, and move its sequences. `Conflict` for the last one."""
        member = self._replicas.member(name)
        if member.state == "draining":
            return
        await self._fleet.wake()
        if member.state != "ready":
            raise Conflict(f"the replica {name} is {member.state}, so there is nothing to drain")
        if len(self._replicas.placer.loads) == 1:
            raise Conflict(f"{name} is the last replica that is ready; add another one first")
        member.drained = True
        self._fleet.use(member)
        self._empty(member)

    def resume(self, name: str) -> None:
        """Use a drained replica again, also one that is drained to be restarted or ended."""
        self._resume(self._replicas.member(name))

    def _resume(self, member: Member) -> None:
        member.drained = member.leaves = False
        if member.state == "draining":
            self._fleet.use(member)

    async def restart(self, name: str) -> None:
        """Drain a replica, wait until it is empty, and start it again. `Conflict` for the last
        one, and where the fleet starts none.
        """
        self._launcher.check()
        member = self._replicas.member(name)
        try:
            await self._emptied(member)
            await self._launcher.restart(name)
        finally:
            if not member.leaves:  # else a later order ends it
                self._resume(member)

    async def _emptied(self, member: Member) -> None:
        """Drain a replica and wait until it is empty. `Conflict` if it is resumed meanwhile."""
        if member.state == "ready":
            await self.drain(member.name)
        while member.sequences and member.drained:  # noqa: ASYNC110 (a rare order)
            await asyncio.sleep(EMPTY_S)
        if member.state == "ready":
            raise Conflict(f"{member.name} was resumed before it was empty, so it goes on")

    async def scale(self, replicas: int) -> None:
        """Start or stop replicas until there are that many: those that are not ready go first, then
        those that sleep, then the idlest and newest. Each that stops is drained, and is used again
        if a later order wants it before it is empty. `Conflict` if not all can be started; then
        none is.
        """
        members = [each for each in self._replicas.members.values() if not each.ends]
        more = replicas - len(members)
        self._launcher.check(more)
        for _ in range(more):
            started = self._replicas.members.get(await self._launcher.start())
            if started is not None:  # it may take the place of one that ends, and is to stay
                started.leaves = started.ends = False
        newest = members[::-1]
        idlest = sorted(
            newest, key=lambda each: (each.state == "ready", not each.asleep, each.sequences)
        )
        excess = idlest[: max(0, -more)]
        for member in members:
            if member.leaves and member not in excess:
                self._resume(member)
            elif member in excess and not member.leaves:
                member.leaves = True
                self._fleet.spawn(self._stop(member))

    async def _stop(self, member: Member) -> None:
        try:
            if member.asleep:  # it is empty, and need not be woken for its end
                member.drained = True
            else:
                await self._emptied(member)
            member.ends = True
            await self._launcher.stop(member.name)
        except TltError as error:
            log.warning("replica_not_stopped", name=member.name, reason=error.message)
            member.ends = False
            self._resume(member)


def _status(member: Member) -> ReplicaStatus:
    info, load = member.info, member.load
    versions = {}
    if info is not None:
        versions = {"target": info.weight_version, "drafter": info.drafter_version}
    return ReplicaStatus(
        name=member.name,
        state=member.state,
        asleep=member.asleep,
        address=member.address.link,
        url=member.url,
        versions={role: version for role, version in versions.items() if version},
        running=int(member.gauges.get("running", 0)),
        waiting=int(member.gauges.get("waiting", 0)),
        expected_wait_s=round(load.figures()[0], 3) if load is not None else 0.0,
        moves=member.moves,
        fault=member.fault,
    )
