"""The fleet of a gateway: its replicas, who of them is used, and what becomes of their sequences.

To the rest of the frontend a fleet is one engine, `Replicas.whole`, whose epochs last from the
first replica that is ready until none is left. `Fleet` is the link of that engine: orders go to
every replica. `launching` says where replicas are, `RemoteLink` holds a link to each, and all that
arrives comes to `take` and `died`. A replica is used once it was compared with the fleet and has
every committed version.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, get_args

import msgspec
import structlog

from tlt_server.errors import Conflict, EngineFailed, NotFound, TltError, from_code
from tlt_server.frontend.link.client import EngineClient
from tlt_server.frontend.link.fan_out import FanOut
from tlt_server.frontend.link.joining import differences, together
from tlt_server.frontend.link.launching import Launcher, ReplicaAddress
from tlt_server.frontend.link.link import Death
from tlt_server.frontend.link.members import FleetReplicas, Member
from tlt_server.metrics.fleet import FleetMetrics
from tlt_server.wire.commands import Command, LookAtWeights, Recompute, WeightCommand
from tlt_server.wire.events import (
    ControlReport,
    EngineInfo,
    Event,
    Outputs,
    Phase,
    PhaseProgress,
    Ready,
    WeightReport,
)

CATCH_UP_S = 1.0  # between two tries of a replica to catch up
ROUSE_S = 10.0  # at the end, for replicas that sleep
SUMMED_S = 0.25  # time for which the sums of gauges are used
# Gauges that are no counts, by how their names begin.
MEANS = ("cost_error", "training_slowdown", "outlook_ratio_", "policy_preparing")

log = structlog.get_logger()


class Fleet:
    def __init__(
        self,
        client: EngineClient,
        replicas: FleetReplicas,
        launcher: Launcher,
        fan_out: FanOut,
        connect: Callable[[Fleet, Member], Coroutine[Any, Any, None]],
        metrics: FleetMetrics,
    ) -> None:
        """`client`: was made with these `replicas`. `connect` holds the link to a member, until
        cancelled.
        """
        self._client, self._replicas, self._launcher = client, replicas, launcher
        self._fan_out, self._connect, self._metrics = fan_out, connect, metrics
        self._kind: EngineInfo | None = None  # every replica agrees with it
        self._tasks: set[asyncio.Task[Any]] = set()
        self.members: dict[str, Member] = {}
        self._sums: dict[str, float] = {}  # the gauges of all replicas
        self._summed_s = -math.inf
        self.ordering = 0  # orders in progress
        self.rouse: Callable[[], Awaitable[None]] = _none_sleeps
        self._over: asyncio.Future[EngineFailed] = asyncio.get_running_loop().create_future()

    # which replicas there are

    async def run(self) -> EngineFailed:
        """Keep a link to every replica of the launcher until cancelled; then end them all. Return
        an error if all replicas refuse this gateway.
        """
        launching = asyncio.create_task(self._launcher.run(self._found))
        try:
            ends: list[asyncio.Future[Any]] = [launching, self._over]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if launching.done():
                launching.result()
            return await self._over
        finally:
            with suppress(TimeoutError):  # who serves them next may not know that they sleep
                async with asyncio.timeout(ROUSE_S):
                    await self.rouse()
            links = [each.task for each in self.members.values() if each.task is not None]
            for task in (*self._tasks, *links):
                task.cancel()
            launching.cancel()
            await asyncio.wait({launching, *links})

    def _found(self, addresses: Sequence[ReplicaAddress]) -> None:
        """Hold links to exactly these replicas."""
        known = {address.name: address for address in addresses}
        for name in [name for name in self.members if name not in known]:
            self._cut(self.members[name], "it was taken out of the fleet")
            del self.members[name]
        for name, address in known.items():
            member = self.members.get(name)
            if member is None:
                member = self.members[name] = Member(address)
                member.queue = self._client.sequences.where.queue(member)
            elif member.address.link != address.link and member.task is not None:
                self._cut(member, address.fault or "it was started again")
            member.address, member.fault = address, address.fault or member.fault
            if address.link and member.task is None:
                member.is_held = False
                member.task = asyncio.create_task(self._connect(self, member))

    def _cut(self, member: Member, reason: str) -> None:
        if member.task is not None:
            member.task.cancel()
            member.task = None
        if member.runs:
            death = Death("exited", EngineFailed(reason), set())
            self.died(member, death, 0.0, 0.0, blames=False)

    @property
    def pushed_to(self) -> list[Member]:
        """The replicas that every order goes to. Those that sleep are woken before, except by a
        look at their versions.
        """
        members = self.members.values()
        return [each for each in members if each.state in ("ready", "draining", "asleep")]

    @property
    def asleep(self) -> list[Member]:
        """The replicas that have given their memory back, see `idling`."""
        return [each for each in self.members.values() if each.state == "asleep"]

    def lost(self, member: Member, reason: str) -> None:
        """Take out a replica that did not do what the fleet did; its link attaches again."""
        self._cut(member, reason)
        self._found([each.address for each in self.members.values()])

    # what arrives from replicas

    def take(self, event: Event, replica: Member) -> None:
        """Apply an event of a replica."""
        match event:
            case Outputs():
                self._replicas.placer.stepped(replica.name, event.cycle, event.gauges)
                replica.stepped(event)
                self._client.take(msgspec.structs.replace(event, gauges=self._gauges()))
            case Phase() | PhaseProgress():
                replica.start.take(event)
            case Ready(info) if replica in self.members.values():
                replica.ready(info)
                replica.is_held = False
                replica.joining = self.do(self._join(replica, info))
            case WeightReport():
                replica.reported(event)
                replica.weight_answers.settle(event)
            case ControlReport():
                replica.control_answers.settle(event)
        if not isinstance(event, Outputs):
            self._client.changes.tell()

    def died(
        self,
        replica: Member,
        death: Death,
        restart_in_s: float | None,
        start_s: float,
        *,
        blames: bool = True,
    ) -> None:
        """Continue the sequences of a replica elsewhere: its engine has ended, or its link.
        `blames`: they may be the cause.
        """
        if replica.joining is not None:
            replica.joining.cancel()
        replica.state, replica.fault = "lost", death.error.message
        replica.is_held = isinstance(death.error, Conflict)
        self._end_if_refused()
        if not replica.runs:
            return  # another try to reach it has failed
        log.error("replica_lost", name=replica.name, reason=death.error.message)
        for route in self._client.sequences.at(replica):
            self._metrics.moved("lost", 0 if route.held else route.size)
        self._replicas.ready.pop(replica.name, None)
        self._replicas.placer.remove(replica.name)
        replica.died(death.error.message, restart_in_s, start_s)
        suspected = self._suspected(replica, death) if blames else set()
        self._client.sequences.died(replica, suspected, death.error)
        if self._replicas.ready:
            self._client.sequences.resume()
            self.tell()
        elif self.asleep:
            self._replicas.wanted()
        elif self._replicas.whole.runs:
            reason = f"no replica is left: {replica.name}: {death.error.message}"
            self._client.died(Death(death.ending, EngineFailed(reason), set()), 0.0, start_s)

    def _end_if_refused(self) -> None:
        """End the gateway if every replica says that it belongs to another one."""
        held = [each.fault for each in self.members.values() if each.is_held]
        if len(held) == len(self.members) and not self._over.done():
            self._over.set_result(EngineFailed("no replica takes this gateway: " + "; ".join(held)))

    def _suspected(self, replica: Member, death: Death) -> set[str]:
        """Return the sequences that may have caused a death: those that ran if an engine died. A
        replica is lost for other reasons too, so then only those that were lost before.
        """
        if death.started:
            self._client.blame(death, time.monotonic())
            return death.started
        sent = [route for route in self._client.sequences.at(replica) if route.stepped]
        suspected = {route.sent_as for route in sent if route.lost}
        for route in sent:
            route.lost = True
        return suspected

    def _gauges(self) -> dict[str, float]:
        """Return the replicas' gauges together: shares and ratios as their mean, others added."""
        now_s = time.monotonic()
        if now_s >= self._summed_s + SUMMED_S:
            self._summed_s, self._sums = now_s, {}
            for replica in self._replicas:
                for name, value in replica.gauges.items():
                    part = value / len(self._replicas.ready) if name.startswith(MEANS) else value
                    self._sums[name] = self._sums.get(name, 0.0) + part
        return self._sums

    # joining

    async def _join(self, member: Member, info: EngineInfo) -> None:
        """Bring a replica to what the fleet has, and use it; or say why not. One that cannot catch
        up now tries again, since a replica with the committed weights may come back.
        """
        while True:
            found = differences(self._kind or info, info)
            try:
                if found:
                    raise Conflict(f"the replica {member.name} cannot join: {found}")
                await self.catch_up(member)
                return
            except TltError as error:
                member.state, member.fault = "lost", error.message
                log.error("replica_refused", name=member.name, reason=error.message)
            if found:
                return
            await asyncio.sleep(CATCH_UP_S)

    async def catch_up(self, member: Member) -> None:
        """Bring a replica to what the fleet has, and use it."""
        member.state, given = "catching up", list[Any]()
        had = member.info
        await self._fan_out.catch_up(member)
        while self._replicas.whole.runs and (standing := self._standing()) != given:
            for command in standing:
                id = self._client.command_id()
                report = await member.ask(msgspec.structs.replace(command, id=id))
                if report.error is not None:
                    raise from_code(*report.error)
            given = standing
            if "weights" not in self._client.pauses.asleep:  # there may have been a push
                await self._fan_out.catch_up(member)
        self._admit(member)  # at once, so that no order comes in between
        if member.info != had:
            self._metrics.caught_up()

    def _standing(self) -> list[Any]:
        """Return the orders that stand, without ids."""
        policy, pauses = self._client.policies.in_force, self._client.pauses.standing()
        standing = pauses if policy is None else [*pauses, policy]
        return [msgspec.structs.replace(command, id="") for command in standing]

    def _admit(self, member: Member) -> None:
        assert member.info is not None
        self._kind = self._kind or member.info
        member.fault = ""
        self._replicas.placer.add(member.name, member.info.max_running)
        log.info("replica_ready", name=member.name, place=member.address.place)
        self.use(member)

    def use(self, member: Member) -> None:
        """Place sequences at a replica from here on, unless an operator drains it."""
        member.state = "draining" if member.drained else "ready"
        if not member.drained:
            self._replicas.ready[member.name] = member
        self.tell()
        self._client.sequences.resume()

    def tell(self) -> None:
        """Describe the fleet as one engine to the rest of the frontend."""
        whole = self._replicas.whole
        used = (*self._replicas, *self.asleep)
        info = together([each.info for each in used if each.info is not None])
        if whole.runs:
            whole.info = self._client.admission.engine = info
        else:
            whole.connect(self)
            self._client.take(Ready(info))
        self._client.changes.tell()

    # orders to all

    def send(self, command: Command) -> bool:
        """Give an order to every replica. Return False if there is none."""
        if not (self._replicas.ready or self.asleep):
            return False
        if isinstance(command, Recompute):
            return any(replica.send(command) for replica in self._replicas)
        self.do(self._order(command))
        return True

    async def _order(self, command: Any) -> None:
        of_weights = isinstance(command, get_args(WeightCommand))
        give: Any = self._fan_out.weights if of_weights else self._fan_out.control
        self.ordering += 1
        try:
            if command != LookAtWeights(command.id):
                await self.rouse()
            report = await give(command)
        except Exception as error:
            failed = self._typed(error)
            if of_weights:
                self._replicas.whole.weight_answers.refuse(command.id, failed)
                return
            report = ControlReport(command.id, (failed.code, failed.message))
        finally:
            self.ordering -= 1
            self._client.sequences.resume()  # what was submitted during a commit has waited
        self._client.take(report)
        if of_weights and report.role in ("target", "all"):
            self._replicas.placer.forget()
        if self._replicas.ready:
            self.tell()

    def _typed(self, error: Exception) -> TltError:
        """Return the error for the caller of an order, who would wait for ever without one."""
        if isinstance(error, TltError):
            return error
        return self._client.faults.contain(error, "an order to the fleet")

    def do(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def member(self, name: str) -> Member:
        member = self.members.get(name)
        if member is None:
            known = ", ".join(sorted(self.members)) or "none"
            raise NotFound(f"there is no replica {name!r}; the fleet has {known}")
        return member


async def _none_sleeps() -> None:
    """Wake no replica."""
