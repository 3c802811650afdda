"""The gateway's own code over simulated machines: everything from a submission to the bytes of a
link is what `tlt fleet serve` runs.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import grpc

from tlt_client.channels.checksums import digest
from tlt_server.bench.fleets.machine import FleetHistory, Machine, SimulatedWeights, own_id
from tlt_server.bench.fleets.wire import Wire
from tlt_server.errors import Conflict
from tlt_server.frontend.link.admission import Admission
from tlt_server.frontend.link.answers import Changes
from tlt_server.frontend.link.fleet import Fleet
from tlt_server.frontend.link.fleet_file import FleetFile, FleetRecord
from tlt_server.frontend.link.idling import IdleReplicas
from tlt_server.frontend.link.launching import ReplicaAddress
from tlt_server.frontend.link.members import Member
from tlt_server.frontend.link.moving import Mover
from tlt_server.frontend.link.operating import FleetOperations
from tlt_server.frontend.link.placing import Placer
from tlt_server.frontend.link.remote import RemoteLink
from tlt_server.frontend.link.submission import HOP
from tlt_server.metrics import Metrics
from tlt_server.wire.commands import Abort, Command, Submit
from tlt_server.wire.link import Attach

# The gateway whose code runs now, so that its death takes all its tasks with it.
OWNER = contextvars.ContextVar["SimulatedGateway | None"]("OWNER", default=None)
OUTSIDE = contextvars.Context()  # where there is no gateway


class Machines(dict[str, Machine]):
    """The launcher of simulated servers, by name."""

    def __init__(self, count: int, make: Callable[[str], Machine]) -> None:
        super().__init__()
        self._make, self._changes = make, Changes()
        for _ in range(count):
            self._add()

    def _add(self) -> str:
        name = f"r{int(max(self, default='r-1')[1:]) + 1:03}"
        self[name] = self._make(name)
        self._changes.tell()
        return name

    async def run(self, found: Callable[[Sequence[ReplicaAddress]], None]) -> None:
        while True:
            change = self._changes.next
            found([ReplicaAddress(name, f"{name}:1") for name in self])
            await change.wait()

    def check(self, more: int = 0) -> None:
        """Refuse nothing."""

    async def start(self) -> str:
        return OUTSIDE.run(self._add)

    async def stop(self, name: str) -> None:
        gateway, machine = OWNER.get(), self[name]
        if gateway is None or gateway.disk.gone:
            raise Conflict("the gateway of this launcher is dead")
        sent = {route.sent_as for route in gateway.client.sequences.routes.values()}
        if any(own_id(id) in sent for id in machine.engine.running):
            machine.history.wrong.append(f"{name} was stopped while it ran requests")
        del self[name]
        machine.end()
        self._changes.tell()

    async def restart(self, name: str) -> None:
        OUTSIDE.run(self[name].restart, 0.5)


class SimulatedDisk(FleetFile):
    """The record of a fleet, which notes each version that is committed, and which of them with
    damaged content: with one replica left there is nothing to compare it with.
    """

    def __init__(self, state_dir: Path, history: FleetHistory, damaged: set[str]) -> None:
        self.history, self.damaged, self.gone = history, damaged, False
        super().__init__(state_dir)

    def commit(self, record: FleetRecord) -> None:
        if self.gone:
            raise OSError("the gateway of this disk is dead")
        super().commit(record)
        target, committed = record.roles.get("target"), self.history.committed
        if target is not None and target.version in committed:  # what all refused is taken back
            del committed[committed.index(target.version) + 1 :]
        elif target is not None:
            committed.append(target.version)
            if target.digest != digest(SimulatedWeights(target.version).checksums):
                self.damaged.add(target.version)


class SimulatedLink(RemoteLink):
    def __init__(self, machine: Machine, gateway: SimulatedGateway, *how: Any) -> None:
        super().__init__(f"{machine.name}:1", *how)
        self._machine, self._gateway = machine, gateway

    def send(self, command: Command) -> bool:
        disk = self._gateway.disk
        if isinstance(command, Submit) and not disk.gone:
            newest = len(disk.history.committed) - 1
            oldest = newest - self._gateway.fan_out.committing.locked()
            disk.history.oldest |= {request.id: oldest for request in command.requests}
        if isinstance(command, Abort) and not disk.gone:  # these move by choice
            for id in command.ids:
                self._gateway.moved(id.partition(HOP)[0])
        return super().send(command)

    def _channel(self) -> grpc.aio.Channel:
        channel: Any = Wire(self._machine)
        return channel


class SimulatedGateway:
    def __init__(
        self,
        machines: Machines,
        disk: SimulatedDisk,
        metrics: Metrics,
        placer: Placer,
        mover: Callable[[Placer], Mover],
        *,
        moved: Callable[[str], None] = lambda id: None,
        sleep_idle_s: float = 0.0,
    ) -> None:
        """`moved`: is told of each request that is moved by choice."""
        self.moved = moved
        self.machines, self.disk = machines, disk
        self.tasks: set[asyncio.Task[Any]] = set()
        OWNER.set(self)
        admission = Admission(max_queue=10**6, max_queue_tokens=10**9, max_page_forecast=1e9)
        self.fleet = Fleet(
            admission, metrics, machines, self._connect, disk, url="http://gateway", commit_s=2.0
        )
        self.client, self.fan_out = self.fleet.client, self.fleet.fan_out
        self.fleet.replicas.placer = placer
        self.operations = FleetOperations(self.fleet, mover(placer))
        self.over = asyncio.create_task(self.fleet.run())
        self.moving = asyncio.create_task(self.operations.run())
        if sleep_idle_s:
            clock = asyncio.get_running_loop().time
            idle = IdleReplicas(self.fleet, sleep_idle_s, clock=clock)
            self.idling = asyncio.create_task(idle.run())

    async def _connect(self, fleet: Fleet, member: Member) -> None:
        machine = self.machines[member.name]
        await SimulatedLink(machine, self, self._attach, fleet, member).run()

    def _attach(self) -> Attach:
        record = self.disk.record
        return Attach(fleet=record.fleet, epoch=record.epoch)

    @property
    def phase(self) -> str:
        """The phase of a push that the fleet is in."""
        if self.fan_out.committing.locked():
            return "committing"
        states = [member.state for member in self.fleet.members.values()]
        engines = [machine.engine for machine in self.machines.values()]
        if any(engine.open and engine.staging for engine in engines):
            return "catching up" if "catching up" in states else "staging"
        return "staged" if any(engine.open for engine in engines) else "none"

    def kill(self) -> None:
        """End all that it does, in the middle of it."""
        self.disk.gone = True
        for task in self.tasks:
            task.cancel()


def owned_task(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **how: Any
) -> asyncio.Task[Any]:
    """Make a task of the gateway whose code makes it."""
    task = asyncio.Task(work, loop=loop, **how)
    owner = OWNER.get()
    if owner is not None:
        owner.tasks.add(task)
        task.add_done_callback(owner.tasks.discard)
    return task
