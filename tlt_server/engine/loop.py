"""The engine on one page: apply commands, schedule, choose, draft and verify, commit. `step` is the
whole story.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import msgspec

from tlt_server.engine.commands import Commands
from tlt_server.engine.gate import Reason, StepGate
from tlt_server.engine.halt import Halt
from tlt_server.engine.knowledge_file import KnowledgeFile
from tlt_server.engine.policy_changes import PolicyChanges
from tlt_server.engine.pushes.pushes import WeightPushes
from tlt_server.engine.record.recompute import Recomputing
from tlt_server.engine.record.traces import Recorder
from tlt_server.engine.runner import Finished, Runner
from tlt_server.engine.sampling.structures import Structures
from tlt_server.engine.schedule.scheduler import Scheduler
from tlt_server.engine.schedule.sequence import Sequence
from tlt_server.errors import EngineFailed, TltError
from tlt_server.speculation.canary import Canary
from tlt_server.speculation.knowledge import Knowledge
from tlt_server.speculation.policies import Policy
from tlt_server.speculation.sizes import Reach
from tlt_server.speculation.switches import SwitchLog
from tlt_server.wire.commands import Command
from tlt_server.wire.events import ControlReport, WeightReport
from tlt_server.wire.records import OFF, Cycle, GenerateRequest, StepContext, StepOutput, Strategy


class Engine:
    def __init__(
        self,
        gate: StepGate,
        scheduler: Scheduler,
        runner: Runner,
        policy: Policy,
        canary: Canary,
        knowledge: Knowledge,
        knowledge_file: KnowledgeFile,
        switches: SwitchLog,
        changes: PolicyChanges,
        make_sequence: Callable[[GenerateRequest], Sequence],
        pushes: WeightPushes,
        halt: Halt,
        record: Callable[[Reach], bool],
        recorder: Recorder | None,
        structures: Structures,
        training: Callable[[], bool],
    ) -> None:
        """`record`: see `devices.Equipment`. `recorder`: where sequences are kept for training.
        `training`: whether a drafter is being trained now.
        """
        self.gate, self.scheduler, self.runner, self.policy = gate, scheduler, runner, policy
        self.pushes, self.halt, self.faults = pushes, halt, scheduler.faults
        self.knowledge, self.knowledge_file = knowledge, knowledge_file
        self.switches = switches
        self.canary, self.changes, self._record = canary, changes, record
        self._training, self._structures = training, structures
        self._recorder, self._recomputing = recorder, None
        if recorder and recorder.capture:
            self._recomputing = Recomputing(scheduler, recorder.capture, make_sequence)
        self._commands = Commands(
            gate, scheduler, pushes, halt, make_sequence, changes.ask, self._recomputing
        )
        # Measures some steps for policies that predict their time; None: that has been done.
        self.measure: Callable[[], bool] | None = None
        self.last_cycle: Cycle | None = None  # if the last step finished a batch
        self._since = 0.0  # the end of the step before, or the start of this one after idling

    def send(self, command: Command) -> None:
        """Queue a command; it takes effect before the next step."""
        self._commands.send(command)

    def receive(self, message: bytes) -> None:
        """Queue a command that came as a message."""
        self._commands.receive(message)

    def step(self) -> list[StepOutput]:
        """Run one step; return its outputs and those of the commands before it."""
        if self.last_cycle is None:
            self._since = time.perf_counter()
        outputs = self._commands.apply() + self._renew()  # only between steps
        batch = self.scheduler.next_batch()  # None when nothing can run
        if batch:
            # No speculation is an ordinary strategy.
            strategy = self._choose(batch.context)
            self.runner.launch(batch, strategy)  # draft -> verify -> sample -> accept -> commit KV
            self.scheduler.launched(batch, strategy.depth)
        # On a CPU the result comes at once, on a GPU one step late.
        finished = self.runner.collect(busy=batch is not None)
        if finished:
            strategy = finished.cycle.strategy
            outputs += self.scheduler.commit(finished.batch, finished.emissions, strategy)
        self._observe(finished)
        return outputs

    def _renew(self) -> list[StepOutput]:
        """Put in force the policy and the drafter's table that are due."""
        if change := self.changes.advance():
            self.policy = change.policy
            self.switches.policy_replaced(change.command.pins)
        if not (self._recorder and self._recorder.due):
            return []
        outputs = settle(self.scheduler, self.runner)
        with self.faults.containing("the table of the drafter that is recorded"):
            self._recorder.renew()
        return outputs

    def _choose(self, context: StepContext) -> Strategy:
        """Return the strategy of the next step; none where choosing it raised."""
        strategy = OFF
        with self.faults.containing("the choice of a strategy"):
            strategy = self.canary.permitted(self.policy.choose(context))
            self.switches.chose(context, strategy)
        return strategy

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
            training = self._training()
            predicted_s = self.knowledge.observe(cycle, finished.drafted, training=training)
            self.last_cycle = msgspec.structs.replace(cycle, predicted_s=predicted_s)
            self.policy.observe(self.last_cycle)
            if news := self.canary.observe(self.last_cycle):
                print(f"tlt: {news}", file=sys.stderr)

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
        """Read the tokenizer, measure a batch of steps, begin to recompute states that a trainer
        waits for, which the steps do, or record one graph that a later step may need, if nothing
        else is to be done: some tens or hundreds of milliseconds. Return True if there may be more.
        """
        if not (self.idle and self.scheduler.idle and not self.pushes.busy):
            return False
        if self.gate.state != "open":
            return False
        self._structures.prepare()
        # A trainer that runs would slow the steps that are measured.
        if self.policy.measures and self.measure is not None and not self._training():
            self.measure = self.measure if self.measure() else None
            return True
        if self._recomputing is not None and self._recomputing.start():
            return True
        return self._record(self.policy.strategies)

    @property
    def finished(self) -> bool:
        ended = self.scheduler.idle and not self.gate.held_for(Reason.SETTLING)
        return self._commands.stopping and not self._commands and ended

    def reports(self) -> list[WeightReport]:
        """Take the answers to weight commands since the last call."""
        return self.pushes.take_reports()

    def control_reports(self) -> list[ControlReport]:
        """Take the answers to control commands, and to changes of the policy, since the last call.
        What they ended is among the outputs of the last step.
        """
        return self.halt.take_reports() + self.changes.take_reports()

    def gauges(self) -> dict[str, float]:
        """Return the figures; only `contained_faults` where computing the others raised."""
        found: dict[str, float] = {}
        with self.faults.containing("the engine's figures"):
            found = self._figures()
        return {**found, "contained_faults": float(self.faults.count)}

    def _figures(self) -> dict[str, float]:
        return {
            **self.scheduler.gauges(),
            **self.policy.gauges(),
            **self.changes.gauges(),
            **self.knowledge.gauges(),
            **self.canary.gauges(),
            **self.runner.gauges(),
            **self._structures.gauges(),
            **(self._recorder.gauges() if self._recorder else {}),
            **(self._recomputing.gauges() if self._recomputing else {}),
        }


def settle(scheduler: Scheduler, runner: Runner) -> list[StepOutput]:
    """Commit every step in flight, because what they compute with is about to change.

    `EngineFailed` ends the epoch where one is lost, also within a command whose faults are
    contained: the sequences of that step would wait for it for ever.
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
