"""A simulated server at a link: its engine, weights and epochs, and the wire to a gateway.

It answers as `rpc.link` and `rpc.relay` do. What it must never do is noted in `wrong`: carry out an
order of an epoch that is over, or give tokens of weights older than those that the fleet had
committed when it got the sequence.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec

from tlt_client.errors import Conflict, ConnectionFailed
from tlt_server.bench.fleets.replica import SimulatedReplica
from tlt_server.wire.commands import (
    Abort,
    AbortWeights,
    CommitWeights,
    LookAtWeights,
    PushWeights,
    Submit,
)
from tlt_server.wire.events import (
    ControlReport,
    EngineInfo,
    Outputs,
    Ready,
    WeightReport,
    WeightState,
)
from tlt_server.wire.fingerprint import Fingerprint
from tlt_server.wire.link import Attach, Attached, Ended, Ping, decode_link_command, event_messages
from tlt_server.wire.records import GenerateRequest, encode

STAGE_S, COMMIT_S, START_S = 0.4, 0.05, 1.0
NEXT_S = 1e-6  # between two messages, since timers of one moment have no order
INFO = EngineInfo(
    model="simulated",
    weight_version="v0",
    vocab_size=2**17,
    max_model_len=2**16,
    eos_token_ids=[0],
    pages=2**16,
    page_size=16,
    max_running=16,
    drafter="",
    policy="off",
    numerics="strict",
    fingerprint=Fingerprint(1, "float32", "none", "strict 1"),
    attention="none",
    dtype="float32",
    device="cpu",
    threads=1,
    prepared="all strategies",
    phases={},
)


class Wire:
    """One stream between a gateway and a machine: messages in order, late, or held."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.attach = machine, Attach(fleet="none", epoch=1)
        self._arrived: deque[bytes] = deque()
        self._some = asyncio.Event()
        self._free_s = [0.0, 0.0]  # when the last message of each direction arrives
        self.broken: Exception | None = None

    # as a channel and a call of gRPC

    async def __aenter__(self) -> Wire:
        if not self.machine.up or self.machine.cut:
            raise ConnectionFailed(f"{self.machine.name} was not reached")
        return self

    async def __aexit__(self, *error: object) -> None:
        self.end(ConnectionFailed("the gateway has ended the stream"))

    def stream_stream(self, method: str) -> Callable[..., Wire]:
        return lambda metadata: self

    async def write(self, message: bytes) -> None:
        self._later(0, lambda: self.machine.take(self, decode_link_command(message)))

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            await self._some.wait()
            self._some.clear()
            while self._arrived:
                yield self._arrived.popleft()
            if self.broken is not None:
                raise self.broken

    # the machine's side

    def send(self, event: Any) -> None:
        for message in event_messages(event):
            self._later(1, partial(self._arrive, message))

    def end(self, error: Exception) -> None:
        """Break the stream at both ends."""
        if self.broken is None:
            self.broken = error
            if isinstance(error, Conflict):
                self._arrived.append(encode(Ended(error.code, error.message)))
            self._some.set()
            self.machine.left(self)

    def _arrive(self, message: bytes) -> None:
        self._arrived.append(message)
        self._some.set()

    def _later(self, way: int, arrive: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        at_s = max(loop.time() + self.machine.delay_s, self._free_s[way] + NEXT_S)
        self._free_s[way] = at_s
        loop.call_at(at_s, self._passed, arrive)

    def _passed(self, arrive: Callable[[], None]) -> None:
        if self.machine.cut:
            self.machine.held.append(partial(self._passed, arrive))
        elif self.broken is None:
            arrive()


class Machine:
    def __init__(
        self,
        name: str,
        wrong: list[str],
        versions: list[str],
        length: Callable[[GenerateRequest], int],
        peers: Mapping[str, Machine],
        *,
        max_running: int = 16,
        speculates: bool = True,
    ) -> None:
        """`versions`: those that the fleet has committed, the oldest first. `length`: see
        `SimulatedReplica`. `peers`: servers by address.
        """
        self._peers = peers
        self.name, self.wrong, self._versions = name, wrong, versions
        self._length, self._max_running, self._speculates = length, max_running, speculates
        self.up, self.cut, self.delay_s = True, False, 0.002
        self.held: list[Callable[[], None]] = []  # messages while it is cut off
        self.whole = True  # the next push is staged as it was sent
        self._epoch, self._wire = 0, None
        self._start("v0")

    def _start(self, version: str) -> None:
        self.live, self.good = version, True
        self.staged: tuple[str, bool] | None = None
        self.staging = 0  # pushes on their way
        self._floor: dict[str, int] = {}  # id -> index of the oldest version that it may get
        self._engine()

    def _engine(self) -> None:
        self.engine = SimulatedReplica(
            self._outputs, self._length, self._max_running, self._speculates
        )
        self.engine.version, self.engine.corrupt = self.live, not self.good

    # faults

    def crash(self) -> None:
        """End the engine; the server starts another one."""
        if not self.up:
            return
        started = sorted(self.engine.running)
        self.engine.close()
        self._engine()
        self.staged, self.staging = None, 0
        if self._wire is not None:
            self._ready_at_s = asyncio.get_running_loop().time() + START_S
            self._attached = False
            self._wire.send(
                Ended(
                    ending="exited",
                    code="engine_failed",
                    message="it crashed",
                    started=started,
                    restart_in_s=0.0,
                    start_s=START_S,
                )
            )

    def restart(self, down_s: float, version: str = "v0") -> None:
        """End the server, and start it again later with these weights, by default those of its
        model directory.
        """
        if self.up:
            self.up = False
            self.engine.close()
            if self._wire is not None:
                self._wire.end(ConnectionFailed(f"{self.name} has ended"))
            asyncio.get_running_loop().call_later(down_s, self._again, version)

    def _again(self, version: str) -> None:
        self.up = True
        self._start(version)

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

    # the stream

    _attached = False
    _ready_at_s = 0.0
    _wire: Wire | None

    def left(self, wire: Wire) -> None:
        if wire is self._wire:
            self._wire = None
            self.engine.abort([*self.engine.running, *(r.id for r in self.engine.waiting)])

    def expect(self, ids: Iterable[str], oldest: int) -> None:
        """Note that these, which are sent now, get no tokens of versions before this one."""
        self._floor |= dict.fromkeys(ids, oldest)

    def take(self, wire: Wire, command: Any) -> None:
        if not self.up:
            wire.end(ConnectionFailed(f"{self.name} has ended"))
            return
        if isinstance(command, Attach):
            self._attach(wire, command)
            return
        if wire.attach.epoch < self._epoch:
            self.wrong.append(f"{self.name} carried out an order of epoch {wire.attach.epoch}")
        if isinstance(command, Ping):
            wire.send(Ping())
        elif wire is self._wire and self._attached:
            self._carry_out(wire, command)

    def _attach(self, wire: Wire, attach: Attach) -> None:
        if self._is_over(attach):
            wire.end(Conflict("conflict", f"epoch {attach.epoch} is over", status=409))
            return
        wire.attach, self._epoch = attach, max(self._epoch, attach.epoch)
        if (before := self._wire) is not None and before is not wire:
            before.end(Conflict("conflict", f"epoch {attach.epoch} has attached", status=409))
        self._wire, self._attached = wire, True
        wire.send(Attached(attach.epoch, f"http://{self.name}"))
        self._after(
            max(0.0, self._ready_at_s - asyncio.get_running_loop().time()),
            lambda: Ready(
                msgspec.structs.replace(
                    INFO, weight_version=self.live, max_running=self._max_running
                )
            ),
        )

    def _is_over(self, attach: Attach) -> bool:
        return attach.epoch < self._epoch

    def _after(self, seconds: float, event: Callable[[], Any]) -> None:
        """Send an event later, unless the stream or the engine has changed by then."""
        wire, engine = self._wire, self.engine

        def send() -> None:
            if wire is not None and wire is self._wire and engine is self.engine:
                wire.send(event())

        asyncio.get_running_loop().call_later(seconds, send)

    def _outputs(self, event: Outputs) -> None:
        for output in event.outputs:
            older = self._versions[: self._floor.get(output.id, 0)]
            if output.token_ids and output.weight_version in older:
                self.wrong.append(f"{self.name} gave {output.id} tokens of {output.weight_version}")
        if self._wire is not None:
            self._wire.send(event)

    def _carry_out(self, wire: Wire, command: Any) -> None:
        match command:
            case Submit(requests):
                self.engine.submit(requests)
            case Abort(ids, finish_reason):
                self.engine.abort(ids, finish_reason)
            case LookAtWeights() | AbortWeights():
                if isinstance(command, AbortWeights):
                    self.staged = None
                self._after(0.0, lambda: self._report(command.id, "looked"))
            case PushWeights(id, manifest):
                sources = [self._peers.get(url) for url in manifest.path.split()]
                good = [each.good for each in sources if each and each.live == manifest.version]
                staged = manifest.version, good[0] if good else self.whole
                self.whole = True
                self.staging += 1

                def push() -> WeightReport:
                    self.staging -= 1
                    self.staged = staged
                    if manifest.commit:
                        return self._commit(id)
                    return self._report(id, "staged", staged)

                self._after(STAGE_S, push)
            case CommitWeights(id):
                self._after(COMMIT_S, lambda: self._commit(id))
            case _:
                self._after(0.0, lambda: ControlReport(command.id))

    def _commit(self, id: str) -> WeightReport:
        if self.staged is None:
            return msgspec.structs.replace(
                self._report(id, "conflict"), error=("conflict", "nothing is staged")
            )
        self.engine.tell()  # the tokens so far are of the weights so far
        (self.live, self.good), self.staged = self.staged, None
        self.engine.version, self.engine.corrupt = self.live, not self.good
        return self._report(id, "committed")

    def _report(self, id: str, result: str, of: tuple[str, bool] | None = None) -> WeightReport:
        version, good = of or (self.live, self.good)
        opened = (
            {"version": self.staged[0], "role": "target", "state": "staged"} if self.staged else {}
        )
        return WeightReport(
            id=id,
            result=result,
            version=version,
            role="target",
            checksums=checksums_of(version, good),
            state=WeightState(target=self.live, open=opened),
        )


def checksums_of(version: str, good: bool) -> dict[str, str]:
    return {"weight": f"mix64:{version}{'' if good else ' damaged'}"}
