"""The gateway's own code over simulated machines: everything from a submission to the bytes of a
link is what `tlt fleet serve` runs.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from tlt_client.channels.checksums import digest
from tlt_server.bench.fleets.machine import Machine, Wire, checksums_of
from tlt_server.frontend.link.admission import Admission
from tlt_server.frontend.link.fleet import Fleet
from tlt_server.frontend.link.fleet_file import FleetFile, FleetRecord
from tlt_server.frontend.link.launching import ReplicaAddress
from tlt_server.frontend.link.members import Member
from tlt_server.frontend.link.moving import Mover
from tlt_server.frontend.link.operating import FleetOperations
from tlt_server.frontend.link.placing import Placer
from tlt_server.frontend.link.remote import RemoteLink
from tlt_server.metrics import Metrics
from tlt_server.wire.commands import Command, Submit
from tlt_server.wire.link import Attach

# The gateway whose code runs now, so that its death takes all its tasks with it.
OWNER = contextvars.ContextVar["SimulatedGateway | None"]("OWNER", default=None)


class SimulatedDisk(FleetFile):
    """The record of a fleet, which notes each version that is committed, and which of them with
    damaged content: with one replica left there is nothing to compare it with.
    """

    def __init__(self, state_dir: Path, versions: list[str], damaged: set[str]) -> None:
        self.versions, self.damaged, self.gone = versions, damaged, False
        super().__init__(state_dir)

    def commit(self, record: FleetRecord) -> None:
        if self.gone:
            raise OSError("the gateway of this disk is dead")
        super().commit(record)
        target = record.roles.get("target")
        if target is not None and target.version not in self.versions:
            self.versions.append(target.version)
            if target.digest != digest(checksums_of(target.version, True)):
                self.damaged.add(target.version)


class SimulatedLink(RemoteLink):
    def __init__(self, machine: Machine, gateway: SimulatedGateway, *how: Any) -> None:
        super().__init__(f"{machine.name}:1", *how)
        self._machine, self._gateway = machine, gateway

    def send(self, command: Command) -> bool:
        if isinstance(command, Submit) and not self._gateway.disk.gone:
            newest = len(self._gateway.disk.versions) - 1
            oldest = newest - self._gateway.fan_out.committing.locked()
            self._machine.expect((request.id for request in command.requests), oldest)
        return super().send(command)

    def _channel(self) -> grpc.aio.Channel:
        channel: Any = Wire(self._machine)
        return channel


class SimulatedGateway:
    def __init__(
        self,
        machines: Mapping[str, Machine],
        disk: SimulatedDisk,
        metrics: Metrics,
        placer: Placer,
        mover: Callable[[Placer], Mover],
    ) -> None:
        self.machines, self.disk = machines, disk
        self.tasks: set[asyncio.Task[Any]] = set()
        OWNER.set(self)
        admission = Admission(max_queue=10**6, max_queue_tokens=10**9, max_page_forecast=1e9)
        self.fleet = Fleet(
            admission, metrics, self, self._connect, disk, url="http://gateway", commit_s=2.0
        )
        self.client, self.fan_out = self.fleet.client, self.fleet.fan_out
        self.fleet.replicas.placer = placer
        self.operations = FleetOperations(self.fleet, mover(placer))
        self.over = asyncio.create_task(self.fleet.run())
        self.moving = asyncio.create_task(self.operations.run())

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
        if any(machine.staging for machine in self.machines.values()):
            return "catching up" if "catching up" in states else "staging"
        if any(machine.staged for machine in self.machines.values()):
            return "staged"
        return "none"

    def kill(self) -> None:
        """End all that it does, in the middle of it."""
        self.disk.gone = True
        for task in self.tasks:
            task.cancel()

    # as a launcher

    async def run(self, found: Callable[[Sequence[ReplicaAddress]], None]) -> None:
        found([ReplicaAddress(name, f"{name}:1") for name in self.machines])
        await asyncio.Event().wait()

    def check(self, more: int = 0) -> None:
        """Machines are given, and can be restarted."""

    async def start(self) -> str:
        raise NotImplementedError

    async def stop(self, name: str) -> None:
        raise NotImplementedError

    async def restart(self, name: str) -> None:
        self.machines[name].restart(0.5)


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
