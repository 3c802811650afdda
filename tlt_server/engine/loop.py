"""The engine's one page: apply commands, schedule, choose, draft and verify, commit. `step` is the
whole story.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from tlt_server.engine.batch import Batch
from tlt_server.engine.halt import Halt
from tlt_server.engine.pushes import WeightPushes
from tlt_server.engine.runner import Finished
from tlt_server.engine.scheduler import Scheduler
from tlt_server.engine.sequence import Sequence
from tlt_server.errors import EngineFailed, TltError
from tlt_server.records import (
    Abort,
    AbortWeights,
    ClearCache,
    Command,
    CommitWeights,
    ControlReport,
    Cycle,
    GenerateRequest,
    JoinGroup,
    LeaveGroup,
    LookAtWeights,
    NameWeights,
    Pause,
    PushWeights,
    ReadWeights,
    Resume,
    RollbackWeights,
    SetPolicy,
    Sleep,
    StepOutput,
    Stop,
    Strategy,
    Submit,
    WakeUp,
    WeightReport,
)
from tlt_server.speculation.canary import Canary
from tlt_server.speculation.policies import Policy


class Runner(Protocol):
    """Computes batches in order; a pipelined one may keep its newest result back while `busy`."""

    @property
    def in_flight(self) -> int: ...  # batches launched whose result was not collected

    def launch(self, batch: Batch, strategy: Strategy) -> None: ...

    def collect(self, *, busy: bool) -> Finished | None: ...

    def gauges(self) -> Mapping[str, float]: ...


class Engine:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        policy: Policy,
        canary: Canary,
        make_policy: Callable[[SetPolicy], Policy],
        make_sequence: Callable[[GenerateRequest], Sequence],
        pushes: WeightPushes,
        halt: Halt,
    ) -> None:
        self.scheduler, self.runner, self.policy, self.pushes, self.halt = (
            scheduler,
            runner,
            policy,
            pushes,
            halt,
        )
        self._canary = canary
        self.last_cycle: Cycle | None = None
        self._last_end = 0.0
        self._stopping = False
        self._make_policy, self._make_sequence = make_policy, make_sequence
        self._commands: deque[Command] = deque()
        self._ended: list[StepOutput] = []  # ends decided between steps
        pushes.settle = halt.settle = self._settle

    def send(self, command: Command) -> None:
        """Queue a command; it takes effect before the next step."""
        self._commands.append(command)

    @property
    def idle(self) -> bool:
        """Nothing to do until the next command."""
        return (
            not self._commands
            and not self.halt.due
            and not self.pushes.settling
            and not self.pushes.transaction.untidy
            and (self.scheduler.idle or self.scheduler.halted)
            and not self.runner.in_flight
        )

    @property
    def finished(self) -> bool:
        return (
            self._stopping
            and not self._commands
            and self.scheduler.idle
            and not self.pushes.settling
        )

    def gauges(self) -> dict[str, float]:
        return {
            **self.scheduler.gauges(),
            **self.policy.gauges(),
            **self._canary.gauges(),
            **self.runner.gauges(),
        }

    def reports(self) -> list[WeightReport]:
        """Answers to weight commands since the last call."""
        return self.pushes.take_reports()

    def control_reports(self) -> list[ControlReport]:
        """Answers to control commands since the last call; what they ended is among the outputs of
        the step before.
        """
        return self.halt.take_reports()

    def step(self) -> list[StepOutput]:
        started = self._last_end if self.last_cycle else time.perf_counter()
        self._apply_commands()  # only between steps
        batch = (
            None if self.pushes.settling else self.scheduler.next_batch()
        )  # None when nothing can run
        if batch:
            strategy = self._canary.permitted(
                self.policy.choose(batch.context)
            )  # "no speculation" is an ordinary arm
            self.runner.launch(batch, strategy)  # draft -> verify -> sample -> accept -> commit KV
            self.scheduler.launched(batch, strategy.depth)
        finished = self.runner.collect(
            busy=batch is not None
        )  # on a CPU at once, on a GPU one step late
        outputs, self._ended = self._ended, []
        if finished is None:
            self.last_cycle = None
            return outputs
        outputs += self.scheduler.commit(finished.batch, finished.emissions)
        self._last_end = time.perf_counter()
        emitted = sum(
            len(emission.tokens) for emission in finished.emissions
        )  # what a stop cut off is gone by now
        self.last_cycle = msgspec.structs.replace(
            finished.cycle, emitted=emitted, step_s=self._last_end - started
        )
        self.policy.observe(self.last_cycle)
        if news := self._canary.observe(self.last_cycle):
            print(f"tlt: {news}", file=sys.stderr)
        return outputs

    def _settle(self) -> list[StepOutput]:
        """Take in every step in flight, because what they computed with is about to change."""
        outputs: list[StepOutput] = []
        while (finished := self.runner.collect(busy=False)) is not None:
            outputs += self.scheduler.commit(finished.batch, finished.emissions)
        return outputs

    def _apply_commands(self) -> None:
        self._ended += self.scheduler.expire()
        while self._commands:
            self._apply(self._commands.popleft())
        self._ended += self.pushes.advance()
        if not self.pushes.settling:  # what waits for the end of what ran waits for the change, too
            self._ended += self.halt.advance()

    def _apply(self, command: Command) -> None:
        match command:
            case Submit(requests):
                self._submit(requests)
            case Abort(ids, finish_reason, all):
                self._ended += self.scheduler.abort(ids, finish_reason, all=all)
            case Pause() | Resume() | Sleep() | WakeUp() | ClearCache():
                self._ended += self.halt.apply(command)
            case SetPolicy():
                self._set_policy(command)
            case (
                PushWeights()
                | CommitWeights()
                | AbortWeights()
                | NameWeights()
                | ReadWeights()
                | RollbackWeights()
                | LookAtWeights()
                | JoinGroup()
                | LeaveGroup()
            ):
                self.pushes.apply(command)
            case Stop(drain):
                self._stopping = True
                if not drain:
                    self._ended += self.scheduler.abort([], all=True)

    def _set_policy(self, command: SetPolicy) -> None:
        try:
            self.policy = self._make_policy(command)
        except TltError as error:  # the frontend has checked it; whoever has not is told here, and nothing changes
            print(
                f"tlt: policy {command.policy!r} is refused, {error.message}; the one in force stays",
                file=sys.stderr,
            )

    def _submit(self, requests: list[GenerateRequest]) -> None:
        try:
            if self.pushes.refusal is not None:
                raise self.pushes.refusal
            self.scheduler.submit([self._make_sequence(request) for request in requests])
        except Exception as cause:  # all or none: the whole batch ends with the reason, and no other request feels it
            error = (
                cause
                if isinstance(cause, TltError)
                else EngineFailed(f"this batch cannot be run: {type(cause).__name__}: {cause}")
            )
            self._ended += [
                StepOutput(
                    id=r.id,
                    token_ids=[],
                    logprobs=[],
                    finish_reason="error",
                    error=(error.code, error.message),
                )
                for r in requests
            ]
