"""The engine on one page: apply commands, schedule, choose, draft and verify, commit. `step` is the
whole story.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from tlt_server.engine.choosing import StrategyChoice
from tlt_server.engine.commands import Commands
from tlt_server.engine.gate import Reason
from tlt_server.engine.halt import Halt
from tlt_server.engine.pushes.pushes import WeightPushes
from tlt_server.engine.record.recompute import Recomputing
from tlt_server.engine.record.traces import Recorder
from tlt_server.engine.runner import Finished, Runner
from tlt_server.engine.sampling.structures import Structures
from tlt_server.engine.schedule.scheduler import Scheduler
from tlt_server.engine.schedule.sequence import Sequence
from tlt_server.errors import EngineFailed, TltError
from tlt_server.speculation.sizes import Reach
from tlt_server.wire.commands import Command
from tlt_server.wire.events import ControlReport, WeightReport
from tlt_server.wire.records import OFF, Cycle, GenerateRequest, StepOutput


class Equipped(Protocol):
    """The device's half; see `devices.Equipment`."""

    runner: Runner

    def record(self, reach: Reach) -> bool: ...


class Engine:
    def __init__(
        self,
        scheduler: Scheduler,
        equipment: Equipped,
        choice: StrategyChoice,
        pushes: WeightPushes,
        halt: Halt,
        make_sequence: Callable[[GenerateRequest], Sequence],
        recorder: Recorder | None,
        structures: Structures,
    ) -> None:
        """`recorder`: keeps sequences for training."""
        self.gate, self.scheduler, self.runner = scheduler.gate, scheduler, equipment.runner
        self.choice, self.pushes, self.halt = choice, pushes, halt
        self.faults = scheduler.faults
        self._record, self._structures = equipment.record, structures
        self._recorder, self._recomputing = recorder, None
        if recorder and recorder.capture:
            self._recomputing = Recomputing(scheduler, recorder.capture, make_sequence)
        self._commands = Commands(
            self.gate, scheduler, pushes, halt, make_sequence, choice.changes.ask, self._recomputing
        )
        # Measures some steps for policies that predict their time; None: that has been done.
        self.measure: Callable[[], bool] | None = None
        self.last_cycle: Cycle | None = None  # if the last step finished a batch
        self.gaps: list[tuple[float, int, int]] = []  # the last step's, see `Scheduler.take_gaps`
        self._since = 0.0  # the end of the step before, or the start of this one after idling

    def send(self, command: Command) -> None:
        """Queue a command; it takes effect before the next step."""
        self._commands.send(command)

    def receive(self, message: bytes) -> None:
        """Queue a command from a message."""
        self._commands.receive(message)

    def step(self) -> list[StepOutput]:
        """Run one step; return its outputs and those of the commands before it."""
        if self.last_cycle is None:
            self._since = time.perf_counter()
        outputs = self._commands.apply() + self._renew()  # only between steps
        batch = self.scheduler.next_batch()  # None when nothing can run
        if batch:
            strategy = OFF  # no speculation is an ordinary strategy
            with self.faults.containing("the choice of a strategy"):
                strategy = self.choice.choose(batch.context)
            self.runner.launch(batch, strategy)  # draft -> verify -> sample -> accept -> commit KV
            self.scheduler.launched(batch, strategy.depth)
        # On a CPU the result comes at once, on a GPU one step late.
        finished = self.runner.collect(busy=batch is not None)
        if finished:
            strategy = finished.cycle.strategy
            outputs += self.scheduler.commit(finished.batch, finished.emissions, strategy)
        self.gaps = self.scheduler.take_gaps()
        self._observe(finished)
        return outputs

    def _renew(self) -> list[StepOutput]:
        """Activate the policy and the drafter's table that are due."""
        self.choice.advance()
        if not (self._recorder and self._recorder.due):
            return []
        outputs = settle(self.scheduler, self.runner)
        with self.faults.containing("the table of the drafter that is recorded"):
            self._recorder.renew()
        return outputs

    def _observe(self, finished: Finished | None) -> None:
        """Learn from the time and the results of a step."""
        if finished is None:
            self.last_cycle = None
            return
        started, self._since = self._since, time.perf_counter()
        emitted = sum(len(emission.tokens) for emission in finished.emissions)  # truncated by now
        cycle = msgspec.structs.replace(
            finished.cycle, emitted=emitted, step_s=self._since - started
        )
        self.last_cycle = cycle
        with self.faults.containing("the figures learnt from a step"):
            self.scheduler.observe(finished.batch, 1e3 * cycle.step_s)
            self.last_cycle = self.choice.observe(cycle, finished.drafted)

    @property
    def idle(self) -> bool:
        """Return True if nothing happens until the next command."""
        due = self._commands or self.halt.due or self.pushes.due or self.scheduler.due
        return not (due or self.runner.in_flight)

    @property
    def compiling(self) -> bool:
        """Return True if nothing happens until a grammar is compiled, or the next command."""
        due = self._commands or self.halt.due or self.pushes.due
        return self.scheduler.compiling and not (due or self.runner.in_flight)

    def use_idle_time(self) -> bool:
        """Do one short task if nothing else is due: read the tokenizer, measure a batch of steps,
        start recomputing states for a trainer, or capture one graph. It takes tens or hundreds of
        milliseconds. Return True if there may be more.
        """
        if not (self.idle and self.scheduler.idle and not self.pushes.busy):
            return False
        if self.gate.state != "open":
            return False
        self._structures.prepare()
        # A trainer that runs would slow the steps that are measured.
        choice = self.choice
        if choice.policy.measures and self.measure is not None and not choice.training():
            self.measure = self.measure if self.measure() else None
            return True
        if self._recomputing is not None and self._recomputing.start():
            return True
        return self._record(choice.policy.strategies)

    @property
    def finished(self) -> bool:
        ended = self.scheduler.idle and not self.gate.held_for(Reason.SETTLING)
        return self._commands.stopping and not self._commands and ended

    def reports(self) -> list[WeightReport]:
        """Return the answers to weight commands since the last call."""
        return self.pushes.take_reports()

    def control_reports(self) -> list[ControlReport]:
        """Return the answers to control commands and policy changes since the last call. The
        sequences that they ended are in the last step's outputs.
        """
        return self.halt.take_reports() + self.choice.changes.take_reports()

    def gauges(self) -> dict[str, float]:
        """Return the figures; only `contained_faults` if computing the others failed."""
        found: dict[str, float] = {}
        with self.faults.containing("the engine's figures"):
            found = self._figures()
        return {**found, "contained_faults": float(self.faults.count)}

    def _figures(self) -> dict[str, float]:
        return {
            **self.scheduler.gauges(),
            **self.choice.gauges(),
            **self.runner.gauges(),
            **self._structures.gauges(),
            **(self._recorder.gauges() if self._recorder else {}),
            **(self._recomputing.gauges() if self._recomputing else {}),
        }


def settle(scheduler: Scheduler, runner: Runner) -> list[StepOutput]:
    """Commit every step in flight, before its weights or memory change.

    A lost step raises `EngineFailed` and ends the epoch, even within a command whose faults are
    contained: otherwise the step's sequences would wait for ever.
    """
    outputs: list[StepOutput] = []
    try:
        while (finished := runner.collect(busy=False)) is not None:
            outputs += scheduler.commit(finished.batch, finished.emissions, finished.cycle.strategy)
    except TltError:
        raise
    except Exception as error:
        raise EngineFailed(f"a step in flight was lost ({type(error).__name__})") from error
    return outputs
