"""The frontend's half of the engine protocol: commands out, events in, each output to the submission that waits for it.

Both sockets are bound here (`ipc://DIR/commands` PUSH, `ipc://DIR/events` PULL) and the engine connects. Invariant: every
submitted sequence sees exactly one output with a `finish_reason`, whatever happens to the engine, the client or the clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
import structlog
import zmq
import zmq.asyncio

from tlt_server.errors import DeadlineExceeded, EngineFailed, StartupError, TltError, Unavailable, from_code
from tlt_server.frontend.admission import Admission, Demand
from tlt_server.metrics import Metrics
from tlt_server.records import (
    Abort,
    Command,
    Cycle,
    EngineInfo,
    Event,
    Failed,
    GenerateRequest,
    Outputs,
    Phase,
    Ready,
    SetPolicy,
    StepOutput,
    Stop,
    Submit,
    WeightCommand,
    WeightReport,
    decode_event,
    encode,
)

log = structlog.get_logger()


class Submission:
    """The sequences of one request: iterate for their outputs, in order of arrival, until each has ended."""

    def __init__(self, ids: Sequence[str], close: Callable[[Submission], None]) -> None:
        self.open = set(ids)
        self._outputs: asyncio.Queue[StepOutput] = asyncio.Queue()
        self._close = close
        self._timer: asyncio.TimerHandle | None = None

    def put(self, output: StepOutput) -> None:
        if output.id in self.open:
            if output.finish_reason is not None:
                self.open.discard(output.id)
                if not self.open and self._timer is not None:
                    self._timer.cancel()
            self._outputs.put_nowait(output)

    def expire_at(self, when: float, expire: Callable[[], None]) -> None:
        self._timer = asyncio.get_running_loop().call_later(max(0.0, when - time.monotonic()), expire)

    async def __aiter__(self) -> AsyncIterator[StepOutput]:
        while self.open or not self._outputs.empty():
            yield await self._outputs.get()

    def close(self) -> None:
        """Abort what has not ended; the engine's answers to that are dropped."""
        if self._timer is not None:
            self._timer.cancel()
        self._close(self)


class EngineClient:
    def __init__(self, directory: Path, admission: Admission, metrics: Metrics,
                 on_phase: Callable[[Phase], None] = lambda phase: None) -> None:
        self._context = zmq.asyncio.Context()
        self._events = self._context.socket(zmq.PULL)
        self._commands = zmq.Context(io_threads=1).socket(zmq.PUSH)  # synchronous: a send never waits, so any code may abort
        for socket, name in ((self._events, "events"), (self._commands, "commands")):
            socket.set_hwm(0)
            socket.bind(f"ipc://{directory / name}")
        self.admission, self._metrics, self._on_phase = admission, metrics, on_phase
        metrics.open_tokens.set_function(lambda: admission.tokens)
        metrics.forecast_pages.set_function(lambda: admission.pages)
        metrics.forecast_wait_s.set_function(admission.wait_s)
        self._routes: dict[str, Submission] = {}
        self._answers: dict[str, asyncio.Future[WeightReport]] = {}  # of weight commands, by id
        self._command_ids = itertools.count(1)
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._idle = asyncio.Event()
        self._idle.set()
        self.dead = asyncio.Event()
        self.info: EngineInfo | None = None
        self.policy: SetPolicy | None = None  # None = what the engine was started with
        self.last_cycle: Cycle | None = None
        self.phases: list[Phase] = []
        self.failure: TltError | None = None
        self.draining = False
        self._tasks: list[asyncio.Task[None]] = []

    # the engine's life

    def start(self, exited: Awaitable[int]) -> None:
        """Begin to listen. `exited` ends, with the exit status, when the engine process does."""
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch(exited))]

    async def ready(self) -> EngineInfo:
        """Wait for the engine; `StartupError` when it fails or exits first."""
        return await asyncio.shield(self._ready)

    async def close(self) -> None:
        self._send(Stop(drain=False))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end_open(Unavailable("the server is shutting down; send the request to another replica or later"))
        self._context.destroy(linger=0)
        self._commands.context.destroy(linger=500)

    async def _listen(self) -> None:
        while True:
            message = await self._events.recv()
            try:
                self._take(decode_event(message))
            except Exception as error:  # an event that is lost would leave its request waiting for ever
                self._fail(EngineFailed(f"an event of the engine could not be taken in: {type(error).__name__}: {error}"))

    def _take(self, event: Event) -> None:
        match event:
            case Outputs():
                self._dispatch(event)
            case Phase():
                self.phases.append(event)
                self._on_phase(event)
            case Ready():
                self.info = self.admission.engine = event.info
                self._metrics.engine_ready(event.info)
                if not self._ready.done():
                    self._ready.set_result(event.info)
            case WeightReport():
                self._answered(event)
            case Failed():
                self._fail(from_code(event.code, event.message))

    async def _watch(self, exited: Awaitable[int]) -> None:
        status = await exited
        await asyncio.sleep(0.05)  # a Failed event may still be in the socket, and says more
        last = f" after the phase {self.phases[-1].name!r}" if self.phases and self.info is None else ""
        self._fail(EngineFailed(f"the engine process exited with status {status}{last}; see its messages above"))

    def _fail(self, error: TltError) -> None:
        """The engine is gone: everything open ends with a typed error. The first failure is the one reported."""
        if self.failure is None:
            self.failure = error
            if self.info is not None:  # before that, start-up reports it
                log.error("engine_gone", code=error.code, reason=error.message, open_sequences=len(self._routes))
        if not self._ready.done():
            self._ready.set_exception(error if isinstance(error, StartupError) else StartupError(error.message))
            self._ready.exception()  # seen, even when nobody waits
        self._end_open(EngineFailed(error.message))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineFailed(f"{error.message}; GET /weights says which version is live once the engine is back"))
        self.dead.set()

    def _end_open(self, error: TltError) -> None:
        for id in list(self._routes):
            self._end(id, error)

    def _end(self, id: str, error: TltError) -> None:
        self._route(StepOutput(id=id, token_ids=[], logprobs=[], finish_reason="error", error=(error.code, error.message)))

    # sequences

    def submit(self, requests: Sequence[GenerateRequest], *, deadline_s: float | None = None) -> Submission:
        """Hand over a batch, all of it or nothing. `Unavailable` or an error of `Admission` when it cannot be taken."""
        self.check_available()
        submission = Submission([request.id for request in requests], self._abandon)
        self.admission.admit(Demand.of(requests))
        self._send(Submit(requests=list(requests)))
        self.admission.open(requests)
        self._routes.update((request.id, submission) for request in requests)
        self._count()
        if deadline_s is not None:
            submission.expire_at(deadline_s, lambda: self._expire(submission))
        return submission

    def check_available(self) -> None:
        if self.draining:
            raise Unavailable("the server is draining before it stops; send the request to another replica", retry_after_s=5)
        if self.failure is not None:
            raise Unavailable(f"the engine is gone: {self.failure.message}", retry_after_s=5)
        if self.info is None:
            raise Unavailable(f"the engine is starting ({len(self.phases)} phases done); poll /readyz", retry_after_s=2)

    def check_room(self, demand: Demand) -> None:
        """As `submit` would raise."""
        self.check_available()
        self.admission.admit(demand)

    def abort(self, ids: Sequence[str], finish_reason: str = "abort") -> None:
        """Ask the engine to end these; their last outputs carry `finish_reason`."""
        live = [id for id in ids if id in self._routes]
        if live:
            self._send(Abort(ids=live, finish_reason=finish_reason))

    def set_policy(self, policy: SetPolicy) -> None:
        """Replace the policy before the engine's next step; commands keep their order, so what is submitted later runs under it."""
        self._send(policy)
        self.policy = policy

    def command_id(self) -> str:
        return f"w{next(self._command_ids)}"

    async def weights(self, command: WeightCommand) -> WeightReport:
        """The engine's answer. A caller that goes away does not stop what it asked for."""
        self.check_available()
        answer = self._answers[command.id] = asyncio.get_running_loop().create_future()
        try:
            self._send(command)
            return await answer
        finally:
            del self._answers[command.id]

    def _answered(self, report: WeightReport) -> None:
        if self.info is not None:
            self.info = msgspec.structs.replace(self.info, weight_version=report.state.target, drafter_version=report.state.drafter)
        self._metrics.weights_reported(report)
        answer = self._answers.get(report.id)
        if answer is not None and not answer.done():
            answer.set_result(report)

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait for what runs; False when time ran out (the rest then ends with a typed error)."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return self._idle.is_set()

    def __len__(self) -> int:
        return len(self._routes)

    def _dispatch(self, message: Outputs) -> None:
        self._metrics.engine_outputs(message)
        if message.cycle is not None:
            self.last_cycle = message.cycle
            self.admission.stepped(message.cycle, message.gauges.get("waiting", 0.0))
        for output in message.outputs:
            self._route(output)

    def _route(self, output: StepOutput) -> None:
        submission = self._routes.get(output.id)
        if submission is None:
            return  # ended here before the engine knew: aborted, expired, or past its stop string
        self.admission.take(output)
        if output.finish_reason is not None:
            del self._routes[output.id]
            self._count()
        submission.put(output)

    def _expire(self, submission: Submission) -> None:
        ids = list(submission.open)
        self._send(Abort(ids=ids))
        for id in ids:
            self._end(id, DeadlineExceeded("the deadline (timeout_s) passed before the sequence ended; ask for fewer tokens or more time"))

    def _abandon(self, submission: Submission) -> None:
        ids = list(submission.open)
        if ids:
            self._send(Abort(ids=ids))
            for id in ids:
                if self._routes.pop(id, None) is not None:
                    self.admission.close(id)
            submission.open.clear()
            self._metrics.sequences.labels("abandoned").inc(len(ids))
            self._count()

    def _count(self) -> None:
        self._metrics.open_sequences.set(len(self._routes))
        if self._routes:
            self._idle.clear()
        else:
            self._idle.set()

    def _send(self, command: Command) -> None:
        try:
            self._commands.send(encode(command), zmq.NOBLOCK)
        except zmq.Again:  # no peer: it has gone, and `_watch` is about to say so
            if isinstance(command, Submit | WeightCommand):
                raise Unavailable("the engine does not take commands; poll /readyz", retry_after_s=2) from None
