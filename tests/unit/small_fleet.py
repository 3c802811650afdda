"""A fleet of replicas that are a few lines each, in a test's loop: token i of a sequence is a
function of its seed and i, so a token that is repeated or missing shows.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from tests.frontend.fake_engine import INFO
from tlt_server.errors import EngineFailed, TltError
from tlt_server.frontend.link.admission import Admission
from tlt_server.frontend.link.fleet import Fleet
from tlt_server.frontend.link.fleet_file import FleetFile
from tlt_server.frontend.link.launching import ReplicaAddress
from tlt_server.frontend.link.link import Death
from tlt_server.frontend.link.members import Member
from tlt_server.frontend.link.moving import Mover
from tlt_server.frontend.link.operating import FleetOperations
from tlt_server.frontend.link.replica import Replica
from tlt_server.frontend.link.submission import Submission
from tlt_server.metrics import Metrics
from tlt_server.wire.commands import Abort, Command, ControlCommand, SetPolicy, Submit
from tlt_server.wire.events import ControlReport, EngineInfo, Outputs, Ready, WeightReport
from tlt_server.wire.records import GenerateRequest, Sampling, StepOutput, last_output

ENDED = EngineFailed("it ended")


def token(seed: int, position: int) -> int:
    return (seed * 1009 + position * 31) % 250


class SmallReplica:
    """The link to a replica, and the replica."""

    def __init__(self, fleet: Fleet, member: Member) -> None:
        self.fleet, self.replica = fleet, member
        member.url = f"http://{member.name}"
        self.running: dict[str, tuple[GenerateRequest, int]] = {}  # with the tokens so far
        self.commands: list[Command] = []
        self.version, self.up = "v0", False
        self.control_error: tuple[str, str] | None = None  # answers every control command
        self.waits = 0  # sequences that have not started, the last ones

    def begin(self, info: EngineInfo = INFO) -> None:
        self.up = True
        self.replica.connect(self)
        self.fleet.take(
            Ready(msgspec.structs.replace(info, weight_version=self.version)), self.replica
        )

    def send(self, command: Command) -> bool:
        if not self.up:
            return False
        self.commands.append(command)
        if isinstance(command, Submit):
            self.running |= {each.id: (each, len(each.generated)) for each in command.requests}
        if isinstance(command, Abort):
            ended = [id for id in command.ids if self.running.pop(id, None) is not None]
            self._give([last_output(id, command.finish_reason) for id in ended])
        if isinstance(command, ControlCommand | SetPolicy):
            asyncio.get_running_loop().call_soon(
                self.fleet.take, ControlReport(command.id, self.control_error), self.replica
            )
        return True

    def step(self, tokens: int = 1) -> None:
        """Give each sequence that many tokens."""
        outputs = []
        for id, (request, done) in [*self.running.items()][: len(self.running) - self.waits]:
            ids = [token(request.seed, done + i) for i in range(tokens)]
            ids = ids[: request.sampling.max_tokens - done]
            self.running[id] = request, done + len(ids)
            over = done + len(ids) == request.sampling.max_tokens
            outputs.append(
                StepOutput(
                    id=id,
                    token_ids=ids,
                    logprobs=[-1.0] * len(ids),
                    finish_reason="length" if over else None,
                    weight_version=self.version,
                )
            )
            if over:
                del self.running[id]
        self._give(outputs)

    def _give(self, outputs: list[StepOutput]) -> None:
        if self.up:
            running = float(len(self.running) - self.waits)
            gauges = {"running": running, "waiting": float(self.waits)}
            self.fleet.take(Outputs(outputs, gauges), self.replica)

    def die(self, started: Sequence[str] | None = None, error: TltError = ENDED) -> None:
        """End the engine while these ran, by default all; with none the link breaks."""
        ran = {*self.running} if started is None else {*started}
        self.running, self.up = {}, False
        self.fleet.died(self.replica, Death("exited", error, ran), 1.0, 1.0)


class NoPushes:
    """Orders to replicas that have nothing to catch up."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self.committing = fleet, asyncio.Lock()

    async def weights(self, command: object) -> WeightReport:
        raise RuntimeError("nothing is pushed")

    async def control(self, command: ControlCommand | SetPolicy) -> ControlReport:
        for replica in self._fleet.replicas.pushed_to:
            await replica.ask(command)
        return ControlReport(command.id)

    async def catch_up(self, replica: Replica) -> None:
        await asyncio.sleep(0)


class SmallFleet:
    def __init__(self, names: str = "abc") -> None:
        self.metrics = Metrics()
        admission = Admission(max_queue=10**6, max_queue_tokens=10**9, max_page_forecast=1e9)
        self.links: dict[str, SmallReplica] = {}
        self.orders: list[str] = []  # to the launcher
        with TemporaryDirectory() as state_dir:
            file = FleetFile(Path(state_dir))
        self.fleet = Fleet(admission, self.metrics, self, self._connect, file, url="http://g")
        self.client, self.replicas = self.fleet.client, self.fleet.replicas
        self.placer = self.replicas.placer
        self.fleet.fan_out = NoPushes(self.fleet)  # type: ignore[assignment]
        self.operations = FleetOperations(self.fleet, Mover(self.placer))
        self.names = list(names)
        self._found: Callable[[Sequence[ReplicaAddress]], None] = lambda addresses: None

    def _connect(self, fleet: Fleet, member: Member) -> Coroutine[Any, Any, Any]:
        self.links[member.name] = SmallReplica(fleet, member)
        return asyncio.Event().wait()

    # as a launcher

    async def run(self, found: Callable[[Sequence[ReplicaAddress]], None]) -> None:
        self._found = found
        self._tell()
        await asyncio.Event().wait()

    def _tell(self) -> None:
        self._found([ReplicaAddress(name, f"{name}:1") for name in self.names])

    def check(self, more: int = 0) -> None:
        """Any number can be started."""

    async def start(self) -> str:
        self.names.append(chr(ord(max(self.names)) + 1))
        self._tell()
        return self.names[-1]

    async def stop(self, name: str) -> None:
        self.orders.append(f"stop {name}")
        self.names.remove(name)
        self._tell()

    async def restart(self, name: str) -> None:
        self.orders.append(f"restart {name}")

    # what tests do

    async def begin(self) -> None:
        self.task = asyncio.create_task(self.fleet.run())
        await settle()
        for link in self.links.values():
            link.begin()
        await settle()

    def submit(self, count: int, tokens: int = 50, **fields: int) -> Submission:
        first = len(self.client)
        return self.client.submit(
            [
                GenerateRequest(
                    id=f"{first + i:x}-0.0",
                    token_ids=[first + i, 2, 3],
                    sampling=Sampling(max_tokens=tokens),
                    seed=first + i,
                    **fields,
                )
                for i in range(count)
            ]
        )

    def step(self, tokens: int = 1) -> None:
        for link in self.links.values():
            link.step(tokens)

    @property
    def counts(self) -> dict[str, int]:
        return {name: len(link.running) for name, link in sorted(self.links.items())}


async def settle() -> None:
    """Let everything that is due run."""
    for _ in range(30):
        await asyncio.sleep(0)


async def read(submission: Submission) -> dict[str, list[StepOutput]]:
    """Return all outputs of a submission, by sequence."""
    outputs: dict[str, list[StepOutput]] = {}
    async for few, _ in submission.slices(lambda output: 1, 256):
        for output in few:
            outputs.setdefault(output.id, []).append(output)
    return outputs


def check_whole(outputs: dict[str, list[StepOutput]], tokens: int = 50) -> None:
    """Assert that each sequence has each of its tokens once, and ends once."""
    for id, few in outputs.items():
        seed = int(id.partition("-")[0], 16)
        given = [token for output in few for token in output.token_ids]
        assert given == [token(seed, i) for i in range(tokens)], id
        assert [output.finish_reason for output in few if output.finish_reason] == ["length"], id
