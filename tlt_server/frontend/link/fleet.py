"""The fleet of a gateway: its replicas, which of them are used, and where their sequences continue.

To the rest of the frontend a fleet is one engine, `whole`, whose epochs last from the first replica
that is ready until none is left. `Fleet` is the link of that engine: orders go to every replica.
`launching` says where replicas are, `RemoteLink` holds a link to each, and all that arrives comes
to `take` and `died`. A replica is used, and the placer then has it, once it was compared with the
fleet and has every committed version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import copy_context
from typing import Any, get_args

import msgspec
import structlog

from tlt_server.errors import Conflict, EngineFailed, TltError, Unavailable
from tlt_server.frontend.link.admission import Admission
from tlt_server.frontend.link.client import EngineClient
from tlt_server.frontend.link.fan_out import FanOut
from tlt_server.frontend.link.fleet_file import FleetFile
from tlt_server.frontend.link.launching import Launcher, ReplicaAddress
from tlt_server.frontend.link.link import Death
from tlt_server.frontend.link.members import FleetReplicas, Member, differences, together
from tlt_server.frontend.link.standing import revoking
from tlt_server.metrics import Metrics
from tlt_server.wire.commands import (
    Command,
    LookAtWeights,
    Memory,
    Recompute,
    Sleep,
    WakeUp,
    WeightCommand,
)
from tlt_server.wire.events import ControlReport, EngineInfo, Event, Outputs, Ready, WeightReport

CATCH_UP_S = 1.0  # between two tries of a replica to catch up
WAKE_S = 10.0  # at the end, for replicas that sleep
MEMORY: list[Memory] = ["weights", "kv_cache"]

log = structlog.get_logger()


class Fleet:
    def __init__(
        self,
        admission: Admission,
        metrics: Metrics,
        launcher: Launcher,
        connect: Callable[[Fleet, Member], Coroutine[Any, Any, None]],
        file: FleetFile,
        *,
        url: str,
        key: str = "",
        commit_s: float = 10.0,
    ) -> None:
        """`connect` holds the link to a member, until cancelled. For the others see `FanOut`."""
        self.launcher, self.metrics, self._connect = launcher, metrics.fleet, connect
        self.replicas = FleetReplicas(lambda: admission.forecast.share, self._commits)
        self.members = self.replicas.members
        self.client = client = EngineClient(admission, metrics, replicas=self.replicas)
        self.fan_out = FanOut(
            lambda: self.replicas.pushed_to,
            file,
            self.lost,
            url=url,
            key=key,
            halted=lambda: client.pauses.paused or bool(client.pauses.asleep),
            commit_s=commit_s,
        )
        self.ordering = 0  # orders in progress
        self._kind: EngineInfo | None = None  # every replica agrees with it
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waking = asyncio.Lock()
        self._after_commit: asyncio.Task[None] | None = None  # places what waits for its end
        self._over: asyncio.Future[EngineFailed] = asyncio.get_running_loop().create_future()

    @property
    def is_committing(self) -> bool:
        """Return True while replicas may have different versions."""
        return self.fan_out.committing.locked()

    def _commits(self) -> bool:
        """Return True during a commit, and place after it what finds no replica now."""
        if self.is_committing and self._after_commit is None:
            self._after_commit = self.spawn(self._place_later())
        return self.is_committing

    async def _place_later(self) -> None:
        async with self.fan_out.committing:
            self._after_commit = None
        self.client.sequences.resume()

    # where replicas are

    async def run(self) -> EngineFailed:
        """Keep a link to every replica of the launcher until cancelled; then end them all. Return
        an error if all replicas refuse this gateway.
        """
        launching = asyncio.create_task(self.launcher.run(self._found))
        try:
            ends: list[asyncio.Future[Any]] = [launching, self._over]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if launching.done():
                launching.result()
            return await self._over
        finally:
            with suppress(TimeoutError):  # the next gateway may not know that they sleep
                async with asyncio.timeout(WAKE_S):
                    await self.wake()
            links = [each.task for each in self.members.values() if each.task is not None]
            for task in (*self._tasks, *links):
                task.cancel()
            launching.cancel()
            await asyncio.wait({launching, *links})

    def _found(self, addresses: Sequence[ReplicaAddress]) -> None:
        """Hold links to exactly these replicas."""
        known = {address.name: address for address in addresses}
        for name in self.members.keys() - known:
            self._cut(self.members[name], "it was taken out of the fleet")
            del self.members[name]
        for name, address in known.items():
            member = self.members.get(name)
            if member is None:
                member = self.members[name] = Member(address)
                member.queue = self.client.sequences.where.queue(member)
            elif member.address.link != address.link and member.task is not None:
                self._cut(member, address.fault or "it was started again")
            member.address, member.fault = address, address.fault or member.fault
            if address.link and member.task is None:
                member.is_held = False
                context = copy_context()
                context.run(structlog.contextvars.clear_contextvars)  # it outlives the order
                member.task = asyncio.create_task(self._connect(self, member), context=context)

    def _cut(self, member: Member, reason: str) -> None:
        if member.task is not None:
            member.task.cancel()
            member.task = None
        if member.runs:
            death = Death("exited", EngineFailed(reason), set())
            self.died(member, death, 0.0, 0.0, blames=False)

    def lost(self, member: Member, reason: str) -> None:
        """Take out a replica that missed a change of the fleet; its link attaches again."""
        self._cut(member, reason)
        self._found([each.address for each in self.members.values()])

    # what arrives from replicas

    def take(self, event: Event, replica: Member) -> None:
        """Apply an event of a replica."""
        match event:
            case Outputs():
                self.replicas.placer.stepped(replica.name, event.cycle, event.gauges)
                replica.stepped(event)
                self.client.take(msgspec.structs.replace(event, gauges=self.replicas.gauges()))
                return
            case Ready(info) if replica in self.members.values():
                replica.ready(info)
                replica.is_held = False
                replica.joining = self.spawn(self._join(replica, info))
            case WeightReport():
                replica.reported(event)
                replica.weight_answers.settle(event)
            case ControlReport():
                replica.control_answers.settle(event)
        self.client.changes.tell()

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
        reason, sequences = death.error.message, self.client.sequences
        replica.state, replica.asleep, replica.fault = "lost", False, reason
        replica.is_held = isinstance(death.error, Conflict)
        self._end_if_refused()
        if not replica.runs:
            return  # another try to reach it has failed
        say = log.info if replica.drained else log.error  # an operator wants it to end
        say("replica_lost", name=replica.name, reason=reason)
        for route in sequences.at(replica):
            self.metrics.moved("lost", 0 if route.held else route.size)
        self.replicas.placer.remove(replica.name)
        replica.load = None
        replica.died(reason, restart_in_s, start_s)
        suspected = self._suspected(replica, death) if blames else set()
        sequences.died(replica, suspected, death.error)
        if self.replicas.placer.loads:
            sequences.resume()
            self.describe()
        elif self.replicas.whole.runs and not self.replicas.asleep:
            reason = f"no replica is left: {replica.name}: {reason}{self._resumable()}"
            self.client.died(Death(death.ending, EngineFailed(reason), set()), 0.0, start_s)
            self.replicas.whole.failure = reason

    def _resumable(self) -> str:
        """Return the remedy if replicas serve nothing only because an operator drains them."""
        drained = [each.name for each in self.members.values() if each.runs and each.drained]
        ways = [f"{name} is drained: resume it (POST /fleet/{name}/resume)" for name in drained]
        return "".join(f"; {way}" for way in ways[:1])

    def _end_if_refused(self) -> None:
        """End the gateway if every replica says that it belongs to another one."""
        held = [each.fault for each in self.members.values() if each.is_held]
        if len(held) == len(self.members):
            self.end(EngineFailed("no replica takes this gateway: " + "; ".join(held)))

    def end(self, error: EngineFailed) -> None:
        """End the gateway, since another one has the fleet."""
        if not self._over.done():
            self._over.set_result(error)

    def _suspected(self, replica: Member, death: Death) -> set[str]:
        """Return the sequences that may have caused a death: those that ran if an engine died. A
        replica is lost for other reasons too, so then only those that were lost before.
        """
        if death.started:
            self.client.blame(death, time.monotonic())
            return death.started
        sent = [route for route in self.client.sequences.at(replica) if route.stepped]
        suspected = {route.sent_as for route in sent if route.lost}
        for route in sent:
            route.lost = True
        return suspected

    # joining

    async def _join(self, member: Member, info: EngineInfo) -> None:
        """Bring a replica to what the fleet has, and use it; or say why not. One that cannot now
        tries again, since a replica with the committed weights may come back.
        """
        while True:
            try:
                if found := differences(self._kind or info, info):
                    raise Conflict(f"the replica {member.name} cannot join: {found}")
                await self._catch_up(member)
                return
            except Exception as error:  # its task ends here, so that none would try again
                refused = self.client.faults.typed(error, "the joining of a replica")
                if member.fault != refused.message:
                    log.error("replica_refused", name=member.name, reason=refused.message)
                member.state, member.fault = "lost", refused.message
                if not self.replicas.whole.runs:
                    reason = f"no replica is ready: {member.name}: {refused.message}"
                    self.replicas.whole.failure = reason
            await asyncio.sleep(CATCH_UP_S)

    async def _catch_up(self, member: Member) -> None:
        """Bring a replica to what the fleet has, and use it with an empty cache."""
        member.state, given = "catching up", list[Any]()
        had = member.info
        await self.fan_out.catch_up(member)
        while (standing := self._standing()) != given:
            for command in (*revoking(given, standing), *standing):
                await member.told(command)
            given = standing
            if "weights" not in self.client.pauses.asleep:  # there may have been a push
                await self.fan_out.catch_up(member)
        if not member.runs:  # it died in this turn of the loop, after its last answer
            raise Unavailable(f"the replica {member.name} was lost while it caught up")
        assert member.info is not None  # it is used at once, so that no order comes in between
        self._kind, member.fault = self._kind or member.info, ""
        member.load = self.replicas.placer.add(member.name, member.info.max_running)
        log.info("replica_ready", name=member.name, place=member.address.place)
        self.use(member)
        if member.info != had:
            self.metrics.caught_up()

    def _standing(self) -> list[Any]:
        """Return the orders that stand, without ids."""
        policy, pauses = self.client.policies.in_force, self.client.pauses.standing()
        standing = pauses if policy is None else [*pauses, policy]
        return [msgspec.structs.replace(command, id="") for command in standing]

    def use(self, member: Member) -> None:
        """Place sequences at a replica from here on, or none if an operator drains it."""
        member.state = "draining" if member.drained else "ready"
        if member.drained:
            self.replicas.placer.remove(member.name)
        elif member.load is not None:
            self.replicas.placer.open(member.load)
        self.describe()
        self.client.sequences.resume()

    def describe(self) -> None:
        """Describe the fleet as one engine to the rest of the frontend."""
        used = [*self.replicas, *self.replicas.asleep]
        if not used:
            return  # all are drained
        info = together([each.info for each in used if each.info is not None])
        if self.replicas.whole.runs:
            self.replicas.whole.info = self.client.admission.engine = info
        else:
            self.replicas.whole.connect(self)
            self.client.take(Ready(info))
        self.client.changes.tell()

    # sleep

    async def sleep(self, member: Member) -> None:
        """Have an empty replica give its memory back. Nothing is placed there from here on."""
        async with self._waking:
            if member.state != "ready" or member.asleep or member.sequences:
                return  # something came in between
            member.asleep = True
            self.replicas.placer.remove(member.name)
            try:
                await member.told(Sleep("", MEMORY))
                log.info("replica_sleeps", name=member.name)
            except TltError as error:
                log.warning("replica_does_not_sleep", name=member.name, reason=error.message)
                if member.asleep:
                    member.asleep = False
                    self.use(member)

    async def wake(self) -> None:
        """Wake all replicas that sleep; one that does not wake is lost, and joins again."""
        async with self._waking:
            await asyncio.gather(*map(self._wake, self.replicas.asleep))

    async def _wake(self, member: Member) -> None:
        try:
            await member.told(WakeUp("", MEMORY))
            member.asleep = False
            await self._catch_up(member)
        except Exception as error:
            failed = self.client.faults.typed(error, "the waking of a replica")
            if member.runs:
                self.lost(member, f"it does not wake: {failed.message}")

    # orders to all

    def send(self, command: Command) -> bool:
        """Give an order to every replica. Return False if there is none."""
        if not (self.replicas.placer.loads or self.replicas.asleep):
            return False
        if isinstance(command, Recompute):
            return any(replica.send(command) for replica in self.replicas)
        self.spawn(self._order(command))
        return True

    async def _order(self, command: Any) -> None:
        of_weights = isinstance(command, get_args(WeightCommand))
        give: Any = self.fan_out.weights if of_weights else self.fan_out.control
        self.ordering += 1
        try:
            if command != LookAtWeights(command.id):
                await self.wake()
            report = await give(command)
        except Exception as error:  # without an answer its caller would wait for ever
            contained = self.client.faults.contain
            typed = isinstance(error, TltError)
            failed: Any = error if typed else contained(error, "an order to the fleet")
            if of_weights:
                self.replicas.whole.weight_answers.refuse(command.id, failed)
                return
            report = ControlReport(command.id, (failed.code, failed.message))
        finally:
            self.ordering -= 1
        self.client.take(report)
        if of_weights and report.role in ("target", "all"):
            self.replicas.placer.forget()
        if self.replicas.placer.loads:
            self.describe()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that ends with the fleet."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
