"""Seeded schedules of faults over a simulated fleet, after which its history is checked.

Every request ends once, with all its tokens in order or with one typed error; no token is of
weights that were not committed; and once the faults are over, all replicas are back, with the same
weights and nothing left open.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from msgspec.structs import replace

from tlt_server.bench.fleets.clock import simulate
from tlt_server.bench.fleets.gateway import (
    OWNER,
    Machines,
    SimulatedDisk,
    SimulatedGateway,
    owned_task,
)
from tlt_server.bench.fleets.machine import FleetHistory, Machine, SimulatedWeights
from tlt_server.bench.fleets.replica import tokens_of
from tlt_server.errors import TltError
from tlt_server.frontend.link.moving import Mover
from tlt_server.frontend.link.placing import Placer
from tlt_server.metrics import Metrics
from tlt_server.process.faults import Containment
from tlt_server.wire.commands import CommitWeights, Manifest, PushWeights
from tlt_server.wire.records import GenerateRequest, Sampling

REQUESTS, FAULTS, PUSHES = 50, 5, 5
LONGEST = 900  # tokens of an output
DELAYS_S = (0.0, 0.002, 0.02)  # time that a message takes
SIZES = (*10 * (3, 4), *6 * (5, 6), *4 * (8,), 12, 12, 64)  # replicas
PHASES = ("none", "staging", "staged", "committing", "catching up")
REACH_S = 2.5  # for which a fault waits for its phase
END_S = 300.0  # after the last fault, until which everything must have ended
RETRY_S, LOOK_S, OPERATOR_S = 0.2, 0.02, 10.0


@dataclass
class Story:
    """A request, as its client sees it."""

    request: GenerateRequest
    tries: int = 0
    tokens: list[int] = field(default_factory=list)
    versions: set[str] = field(default_factory=set)  # the tokens'
    ends: list[str] = field(default_factory=list)  # by the last gateway that had it


class FaultSchedule:
    """One schedule, and its outcome once it has run."""

    def __init__(self, seed: int, state_dir: Path, metrics: Metrics) -> None:
        self._draw, self._state_dir, self._metrics = random.Random(seed), state_dir, metrics
        self._contained = Containment.total
        self.seed, self.history, self.damaged = seed, FleetHistory(), set[str]()
        self.wrong, self.versions = self.history.wrong, self.history.committed
        self._gateways: list[SimulatedGateway] = []
        self._changed = asyncio.Event()  # there is another gateway
        self.faults = Counter[tuple[str, str]]()  # kind and phase
        self.errors = Counter[str]()  # codes of typed errors, and how often an operator had to act
        self._sleep_idle_s = self._draw.choice((0.0, 0.0, 0.7))
        self._peers: dict[str, Machine] = {}
        self.size = self._draw.choice(SIZES)  # replicas
        self.machines = Machines(self.size, self._machine)
        self.stories = {
            f"{at}": Story(
                GenerateRequest(
                    id=f"{at}",
                    token_ids=[at + 1] * self._draw.choice((20, 20, 400)),
                    sampling=Sampling(max_tokens=LONGEST),
                    seed=self._draw.randrange(2**20),
                    group_id=f"g{at // 4}",
                )
            )
            for at in range(REQUESTS)
        }
        self._begin_gateway()

    def _machine(self, name: str) -> Machine:
        machine = Machine(name, self.history, length_of, self._metrics, peers=self._peers)
        machine.delay_s = self._draw.choice(DELAYS_S)
        self._peers[f"http://{name}"] = machine
        return machine

    def _moved(self, id: str) -> None:
        """Check a request that is moved by choice: all its tokens are of the live weights."""
        story = self.stories[id.partition(".")[0]]
        if id.endswith(f".{story.tries}") and story.versions - {*self.versions[-1:]}:
            self.wrong.append(f"{id} moved with tokens of {sorted(story.versions)}")

    def _begin_gateway(self) -> None:
        disk = SimulatedDisk(self._state_dir, self.history, self.damaged)
        self.gateway = SimulatedGateway(
            self.machines,
            disk,
            self._metrics,
            Placer(),
            Mover,
            moved=self._moved,
            sleep_idle_s=self._sleep_idle_s,
        )
        self._gateways.append(self.gateway)
        OWNER.set(None)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def run(self) -> None:
        clients = [asyncio.create_task(self._client(story)) for story in self.stories.values()]
        pushing = asyncio.create_task(self._push())
        operating = asyncio.create_task(self._operate())
        for _ in range(FAULTS):
            await self._fault()
        try:
            async with asyncio.timeout(END_S):
                await asyncio.gather(pushing, *clients)
                await self._settled()
        except TimeoutError:
            self._unsettled()
        operating.cancel()
        for machine in self.machines.values():
            machine.engine.close()
        self._check()

    # clients

    async def _client(self, story: Story) -> None:
        """Send a request until a gateway has ended it."""
        await asyncio.sleep(self._draw.random() * 3.0)
        while not story.ends:
            gateway, changed = self.gateway, self._changed
            reading = asyncio.create_task(self._read(gateway, story))
            other = asyncio.create_task(changed.wait())
            await asyncio.wait({reading, other}, return_when=asyncio.FIRST_COMPLETED)
            other.cancel()
            if not reading.done():  # the connection breaks
                reading.cancel()
                await asyncio.wait({reading})
                story.ends.clear()
            elif not reading.result():
                await asyncio.sleep(RETRY_S)

    async def _read(self, gateway: SimulatedGateway, story: Story) -> bool:
        """Return False if the gateway refuses the request for now."""
        OWNER.set(gateway)
        story.tokens, story.versions, story.tries = [], set(), story.tries + 1
        request = replace(story.request, id=f"{story.request.id}.{story.tries}")
        try:
            submission = gateway.client.submit([request])
        except TltError:
            return False
        async for outputs, _ in submission.slices(lambda output: 1, 64):
            for output in outputs:
                story.tokens += output.token_ids
                story.versions |= {output.weight_version} if output.token_ids else set()
                if output.token_ids and output.weight_version not in self.versions:
                    self.wrong.append(f"{output.id}: version {output.weight_version!r}")
                if output.finish_reason is not None:
                    code = output.error[0] if output.error else ""
                    story.ends.append(code or output.finish_reason)
        return True

    async def _push(self) -> None:
        for number in range(1, PUSHES + 1):
            await asyncio.sleep(1.0 + 2.0 * self._draw.random())
            gateway = self.gateway
            commit = self._draw.random() < 0.7
            OWNER.set(gateway)
            work = asyncio.create_task(_pushed(gateway, f"v{number}", commit=commit))
            OWNER.set(None)
            await asyncio.gather(work, return_exceptions=True)  # it may fail

    async def _operate(self) -> None:
        """Start a replica with the committed weights when none has them any more, as the error of
        one that cannot catch up asks for.
        """
        while True:
            await asyncio.sleep(OPERATOR_S)
            newest, engines = self.versions[-1:], [each.engine for each in self.machines.values()]
            held = {
                each.version for engine in engines for each in (engine.live, engine.open) if each
            }
            if newest and newest[0] not in held:
                self.errors["weights lost"] += 1
                next(iter(self.machines.values())).restart(0.5, newest[0])

    # faults

    async def _fault(self) -> None:
        await asyncio.sleep(self._draw.random())
        kind, phase = self._draw.choice([*KINDS]), self._draw.choice(PHASES)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + REACH_S
        while self.gateway.phase != phase and loop.time() < until_s:  # noqa: ASYNC110 (no event)
            await asyncio.sleep(LOOK_S)
        self.faults[kind, self.gateway.phase] += 1
        KINDS[kind](self, self._draw.choice([*self.machines.values()]))

    def _hold(self, machine: Machine) -> None:
        machine.hold(self._draw.choice((0.5, 2.0, 6.0)))

    def _stop(self, machine: Machine) -> None:
        machine.stop(self._draw.choice((0.5, 2.0, 6.0)))

    def _delay(self, machine: Machine) -> None:
        machine.delay_s = self._draw.choice((0.05, 0.3, 1.0))
        asyncio.get_running_loop().call_later(5.0, setattr, machine, "delay_s", 0.002)

    def _restart_gateway(self, machine: Machine) -> None:
        self.gateway.kill()
        self._begin_gateway()

    def _second_gateway(self, machine: Machine) -> None:
        """Begin another gateway while the one before still runs, without its disk."""
        self.gateway.disk.gone = True
        self._begin_gateway()

    def _drain(self, machine: Machine) -> None:
        gateway = self.gateway

        async def drain() -> None:
            with suppress(TltError):  # it is the last one, or gone
                await gateway.operations.drain(machine.name)
                await asyncio.sleep(2.0)
                gateway.operations.resume(machine.name)

        OWNER.set(gateway)
        gateway.fleet.spawn(drain())
        OWNER.set(None)

    def _scale(self, machine: Machine) -> None:
        """Start or stop a replica, and go back to their number later."""
        gateway = self.gateway

        async def scale() -> None:
            await gateway.operations.scale(max(3, self.size + self._draw.choice((-1, 1))))
            await asyncio.sleep(3.0)
            await gateway.operations.scale(self.size)

        OWNER.set(gateway)
        gateway.fleet.spawn(scale())
        OWNER.set(None)

    def _damage(self, machine: Machine) -> None:
        machine.whole = False

    # the end

    async def _settled(self) -> None:
        """Wait until all replicas are back with the committed weights, and nothing is open."""
        while [*self._open()]:  # noqa: ASYNC110 (no event says so)
            await asyncio.sleep(RETRY_S)

    def _open(self) -> Iterator[str]:
        gateway = self.gateway
        for name, member in gateway.fleet.members.items():
            if member.state != "ready":
                yield f"{name} is {member.state}: {member.fault}"
        for machine in self.machines.values():
            newest = self.versions[-1] if self.versions else ""
            if machine.live != SimulatedWeights(newest, newest not in self.damaged):
                yield f"{machine.name} has {machine.live}, not {newest}"
            if machine.engine.open:
                yield f"{machine.name} still has a push, {machine.engine.open}"
            if machine.engine.running or machine.engine.waiting:
                yield f"{machine.name} runs {[*machine.engine.running]}"
        if gateway.client.open_ids or gateway.fleet.replicas.placer.placed:
            yield f"open: {gateway.client.open_ids}, {[*gateway.fleet.replicas.placer.placed]}"

    def _unsettled(self) -> None:
        self.wrong += [f"{END_S:g} s after the faults {each}" for each in self._open()]
        if not self.wrong:
            self.wrong.append("a push or a client has not ended")

    def _check(self) -> None:
        if Containment.total > self._contained:
            self.wrong.append("an exception was contained")
        self.gateway.fleet.replicas.placer.check()
        for story in self.stories.values():
            request, end = story.request, story.ends[0] if story.ends else "nothing"
            expected = tokens_of(request.seed, 0, length_of(request))
            if len(story.ends) != 1:
                self.wrong.append(f"{request.id} has the ends {story.ends}")
            elif end in ("stop", "length"):
                if story.tokens != expected and not self.damaged:
                    self.wrong.append(f"{request.id} has other tokens than its seed gives")
            elif not self._crashes(story, end) or story.tokens != expected[: len(story.tokens)]:
                self.wrong.append(f"{request.id} ended with {end}")
            else:
                self.errors[end] += 1
        self.errors["damage at the only replica"] += bool(self.damaged)
        for gateway in self._gateways:
            gateway.kill()

    def _crashes(self, story: Story, end: str) -> bool:
        """Return True if a request was refused because it ran at two crashes."""
        id = f"{story.request.id}.{story.tries}"
        return end == "poisoned" and self.history.crashed[id] >= 2


KINDS: dict[str, Callable[[FaultSchedule, Machine], None]] = {
    "crash": lambda schedule, machine: machine.crash(),
    "stop": FaultSchedule._stop,
    "partition": FaultSchedule._hold,
    "delay": FaultSchedule._delay,
    "restart": lambda schedule, machine: machine.restart(1.5),
    "gateway restart": FaultSchedule._restart_gateway,
    "second gateway": FaultSchedule._second_gateway,
    "drain": FaultSchedule._drain,
    "damaged push": FaultSchedule._damage,
    "scale": FaultSchedule._scale,
}


async def _pushed(gateway: SimulatedGateway, version: str, *, commit: bool) -> None:
    """Push a version, in one call or two."""
    client, manifest = gateway.client, Manifest(version=version, path="/w", commit=commit)
    report = await client.weights(PushWeights(client.command_id(), manifest))
    if report.result == "staged":
        await asyncio.sleep(0.3)
        await client.weights(CommitWeights(client.command_id(), version))


def length_of(request: GenerateRequest) -> int:
    """Return the output tokens of a request, which its seed names."""
    return 1 + request.seed * 7919 % request.sampling.max_tokens


def schedules(seeds: Iterable[int]) -> Iterator[FaultSchedule]:
    """Run the schedules of these seeds, and check the history of each."""
    metrics = Metrics()

    async def run(seed: int, state_dir: Path) -> FaultSchedule:
        factory: Any = owned_task
        loop = asyncio.get_running_loop()
        loop.set_task_factory(factory)
        schedule = FaultSchedule(seed, state_dir, metrics)
        loop.set_exception_handler(lambda _, what: schedule.wrong.append(f"unhandled: {what}"))
        await schedule.run()
        await asyncio.sleep(0.1)
        return schedule

    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a rename need not reach a disk
    with TemporaryDirectory(prefix="tlt-faults-", dir=memory) as directory:
        for seed in seeds:
            yield simulate(run(seed, Path(directory, str(seed))))


class ScheduleOutcome(NamedTuple):
    """The outcome of a schedule."""

    seed: int
    faults: Counter[tuple[str, str]]  # kind and phase
    errors: Counter[str]
    wrong: list[str]


def judged_all(seeds: Iterable[int]) -> list[ScheduleOutcome]:
    return [
        ScheduleOutcome(each.seed, each.faults, each.errors, each.wrong)
        for each in schedules(seeds)
    ]
