"""A simulated server at a link: the frontend is the real one, the engine and the network are not.

What it must never do is noted in `wrong`: carry out an order of an epoch that is over, or give
tokens of weights older than those that the fleet had committed when it got the sequence.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from tlt_server.bench.fleets.replica import SimulatedReplica
from tlt_server.bench.frontend import INFO
from tlt_server.errors import EngineFailed
from tlt_server.frontend.link.admission import Admission
from tlt_server.frontend.link.client import EngineClient
from tlt_server.frontend.link.link import Death
from tlt_server.frontend.link.submission import HOP
from tlt_server.frontend.rpc.link import Attachments, FleetEpochs
from tlt_server.metrics import Metrics
from tlt_server.wire.commands import (
    Abort,
    AbortWeights,
    Command,
    CommitWeights,
    ControlCommand,
    Manifest,
    PushWeights,
    SetPolicy,
    Sleep,
    Submit,
    WakeUp,
    WeightCommand,
)
from tlt_server.wire.events import ControlReport, Event, Outputs, Ready, WeightReport, WeightState
from tlt_server.wire.records import GenerateRequest

STAGE_S, COMMIT_S, START_S, SLEEP_S = 0.4, 0.05, 1.0, 0.3
SIMULATED = msgspec.structs.replace(
    INFO, vocab_size=2**17, max_model_len=2**16, eos_token_ids=[0], spooled=True
)


class SimulatedWeights(msgspec.Struct, frozen=True):
    version: str
    good: bool = True  # False: damaged on their way

    @property
    def checksums(self) -> dict[str, str]:
        return {"weight": f"mix64:{self.version}{'' if self.good else ' damaged'}"}


class FleetHistory:
    """The history of all servers of a fleet."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.committed: list[str] = []  # versions by the fleet's record, the oldest first
        self.oldest: dict[str, int] = {}  # id -> index of the oldest version that it may get
        self.crashed = Counter[str]()  # request -> ends of engines and servers that ran it

    def gave(self, machine: str, outputs: Outputs) -> None:
        """Check what an engine computed."""
        for output in outputs.outputs:
            id = own_id(output.id)
            older = self.committed[: self.oldest.get(id, 0)]
            if output.token_ids and output.weight_version in older:
                self.wrong.append(f"{machine} gave {id} tokens of {output.weight_version}")


def own_id(id: str) -> str:
    """Return the gateway's id of a sequence in a server."""
    return id.partition("/")[2]


class SimulatedEngine(SimulatedReplica):
    """Batches, and weights that are staged and committed."""

    def __init__(self, machine: Machine, live: SimulatedWeights) -> None:
        super().__init__(
            self._step, machine.length, machine.max_running, speculates=machine.speculates
        )
        self._machine, self.ended, self.asleep = machine, False, False
        self.open: SimulatedWeights | None = None  # a push, which is staged once `staging` is False
        self.staging = False
        self._make_live(live)

    @property
    def has(self) -> list[SimulatedWeights]:
        return [self.live] if self.open is None else [self.live, self.open]

    def close(self) -> None:
        super().close()
        self.ended = True

    def send(self, command: Command) -> bool:
        """Take a command of the server's frontend, as `EngineLink` does."""
        match command:
            case Submit(requests):
                self.submit(requests)
            case Abort(ids, finish_reason):
                self.abort(ids, finish_reason)
            case PushWeights(id, manifest):
                self._push(id, manifest)
            case CommitWeights(id):
                self._after(COMMIT_S, lambda: self._commit(id))
            case AbortWeights(id):
                self.open = None
                self._after(0.0, lambda: self._answer(id, "aborted"))
            case Sleep(id) | WakeUp(id):
                self.asleep = isinstance(command, Sleep)
                self.rest(asleep=self.asleep)
                self._after(SLEEP_S, lambda: ControlReport(id))
            case _ if isinstance(command, WeightCommand):
                self._after(0.0, lambda: self._answer(command.id, "looked"))
            case _ if isinstance(command, ControlCommand | SetPolicy):
                self._after(0.0, lambda: ControlReport(command.id))
        return True

    def _push(self, id: str, manifest: Manifest) -> None:
        if self.asleep:
            self._machine.history.wrong.append(f"{self._machine.name} got a push while it sleeps")
        if self.open is not None:
            error = "conflict", f"{self.open.version} is being pushed"
            self._after(0.0, lambda: self._answer(id, "conflict", error=error))
            return
        pushed = self.open = self._machine.taken(manifest)
        self.staging = True

        def staged() -> WeightReport:
            if self.open is not pushed:
                return self._answer(id, "conflict", error=("conflict", "the push was aborted"))
            self.staging = False
            return self._commit(id) if manifest.commit else self._answer(id, "staged", pushed)

        self._after(STAGE_S, staged)

    def _commit(self, id: str) -> WeightReport:
        if self.open is None or self.staging:
            return self._answer(id, "conflict", error=("conflict", "nothing is staged"))
        self.tell()  # the tokens so far are of the weights so far
        self._make_live(self.open)
        self.open = None
        return self._answer(id, "committed")

    def _make_live(self, weights: SimulatedWeights) -> None:
        self.live, self.version, self.corrupt = weights, weights.version, not weights.good

    def _answer(
        self,
        id: str,
        result: str,
        of: SimulatedWeights | None = None,
        error: tuple[str, str] | None = None,
    ) -> WeightReport:
        of, opened = of or self.live, dict[str, str]()
        if self.open is not None:
            state = "staging" if self.staging else "staged"
            opened = {"version": self.open.version, "role": "target", "state": state}
        return WeightReport(
            id=id,
            result=result,
            error=error,
            version=of.version,
            role="target",
            checksums=of.checksums,
            state=WeightState(target=self.live.version, open=opened),
        )

    def _step(self, event: Outputs) -> None:
        self._machine.history.gave(self._machine.name, event)
        self._tell(event)

    def _after(self, seconds: float, event: Callable[[], Event]) -> None:
        """Report something later, unless the engine has ended by then."""

        def report() -> None:
            if not self.ended:
                self._tell(event())

        asyncio.get_running_loop().call_later(seconds, report)

    def _tell(self, event: Event) -> None:
        """Hand an event over in the loop's next turn, as what asks for it may not be done."""
        asyncio.get_running_loop().call_soon(self._machine.told, self, event)


class Machine:
    """A server's process: frontend and engine, which crash and start again."""

    attachments: Attachments

    def __init__(
        self,
        name: str,
        history: FleetHistory,
        length: Callable[[GenerateRequest], int],
        metrics: Metrics,
        *,
        peers: Mapping[str, Machine] = {},
        max_running: int = 16,
        speculates: bool = True,
    ) -> None:
        """`length` and `speculates`: see `SimulatedReplica`. `peers`: servers by address."""
        self.name, self.history, self.length, self.peers = name, history, length, peers
        self.max_running, self.speculates, self._metrics = max_running, speculates, metrics
        self.up, self.cut, self.delay_s = True, False, 0.002
        self.held: list[Callable[[], None]] = []  # what arrives once it is not cut off
        self.whole = True  # the next push is staged as it was sent
        self.epoch, self._epochs = 0, FleetEpochs(None)
        self._tasks: set[asyncio.Task[None]] = set()
        self._start(SimulatedWeights("v0"))

    def _start(self, live: SimulatedWeights) -> None:
        admission = Admission(max_queue=10**6, max_queue_tokens=10**9, max_page_forecast=1e9)
        self.client = EngineClient(admission, self._metrics)
        self.attachments = Attachments(self.client, self._epochs, f"http://{self.name}")
        self._begin(live)

    def _begin(self, live: SimulatedWeights) -> None:
        self.engine = SimulatedEngine(self, live)
        self.client.replica.connect(self.engine)
        changed = {"weight_version": live.version, "max_running": self.max_running}
        self.client.take(Ready(msgspec.structs.replace(SIMULATED, **changed)))

    def told(self, engine: SimulatedEngine, event: Event) -> None:
        if engine is self.engine and not engine.ended:
            self.client.take(event)

    def serve(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run a task of this server, in no context of a gateway; False while it is down."""
        if not self.up:
            work.close()
            return False
        task = contextvars.Context().run(asyncio.create_task, work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def ordered(self, epoch: int) -> None:
        """Note an order of a gateway."""
        if epoch < self.epoch:
            self.history.wrong.append(f"{self.name} carried out an order of epoch {epoch}")

    def taken(self, manifest: Manifest) -> SimulatedWeights:
        """Return what a push brings here, which may be damaged on its way."""
        sources = [self.peers.get(url) for url in manifest.path.split()]
        found = [each.engine.live for each in sources if each]
        good = [each.good for each in found if each.version == manifest.version]
        whole, self.whole = self.whole, True
        return SimulatedWeights(manifest.version, good[0] if good else whole)

    # faults

    def crash(self) -> None:
        """End the engine; the server starts another one."""
        if self.up and not self.engine.ended:
            death = Death("exited", EngineFailed("it crashed"), set(self._ended()))
            self.client.died(death, 0.0, START_S)
            asyncio.get_running_loop().call_later(START_S, self._again, self.client, self.live)

    def _again(self, client: EngineClient, live: SimulatedWeights) -> None:
        if client is self.client and self.up:
            self._begin(live)

    @property
    def live(self) -> SimulatedWeights:
        return self.engine.live

    def _ended(self) -> list[str]:
        """End the engine, and return what it ran."""
        ran = [*self.engine.running]
        self.history.crashed.update(own_id(id).partition(HOP)[0] for id in ran)
        self.engine.close()
        return ran

    def restart(self, down_s: float, version: str = "v0") -> None:
        """End the server, and start it again later with these weights, by default those of its
        model directory.
        """
        if self.up:
            self.end()
            asyncio.get_running_loop().call_later(down_s, self._up_again, version)

    def end(self) -> None:
        self.up = False
        self._ended()
        for task in self._tasks:
            task.cancel()

    def _up_again(self, version: str) -> None:
        self.up = True
        self._start(SimulatedWeights(version))

    def hold(self, for_s: float) -> None:
        """Pass on no message for this time."""
        if not self.cut:
            self.cut = True
            asyncio.get_running_loop().call_later(for_s, self._let_go)

    def stop(self, for_s: float) -> None:
        """Do nothing for this time."""
        self.engine.stop(for_s)
        self.hold(for_s)

    def _let_go(self) -> None:
        self.cut = False
        held, self.held = self.held, []
        for arrive in held:
            arrive()
