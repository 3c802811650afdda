"""Commands queued for the next step, dispatched to their executors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import get_args

import msgspec

from tlt_server.engine.gate import Reason, StepGate
from tlt_server.engine.halt import Halt
from tlt_server.engine.pushes.pushes import WeightPushes
from tlt_server.engine.record.recompute import Recomputing
from tlt_server.engine.schedule.scheduler import Scheduler
from tlt_server.engine.schedule.sequence import Sequence
from tlt_server.wire.commands import (
    Abort,
    ClearCache,
    Command,
    ControlCommand,
    Pause,
    Recompute,
    Resume,
    SetPolicy,
    Sleep,
    Stop,
    Submit,
    WakeUp,
    decode_command,
)
from tlt_server.wire.records import GenerateRequest, StepOutput, last_output

CONTROL = {command.__struct_config__.tag for command in (*get_args(ControlCommand), SetPolicy)}


class Commands:
    def __init__(
        self,
        gate: StepGate,
        scheduler: Scheduler,
        pushes: WeightPushes,
        halt: Halt,
        make_sequence: Callable[[GenerateRequest], Sequence],
        set_policy: Callable[[SetPolicy], None],
        recomputing: Recomputing | None,
    ) -> None:
        self._gate, self._scheduler, self._pushes, self._halt = gate, scheduler, pushes, halt
        self._make_sequence, self._set_policy = make_sequence, set_policy
        self._recomputing, self._faults = recomputing, scheduler.faults
        self._waiting: deque[Command] = deque()
        self._unread: list[StepOutput] = []
        self.stopping = False

    def __len__(self) -> int:
        return len(self._waiting) + len(self._unread)

    def send(self, command: Command) -> None:
        self._waiting.append(command)

    def receive(self, message: bytes) -> None:
        """Queue a command from a message. If a value is not allowed, end the named requests or
        command with an error.
        """
        try:
            self.send(decode_command(message))
        except msgspec.ValidationError as cause:
            error = self._faults.contain(cause, "a command that is not valid")
            fields = msgspec.msgpack.decode(message)
            ids = [request["id"] for request in fields.get("requests", ())]
            self._unread += [last_output(id, "error", (error.code, error.message)) for id in ids]
            if fields["type"] in CONTROL:
                self._halt.report(fields.get("id", ""), error)
            elif "id" in fields:
                self._pushes.reports.refuse(fields["id"], error)

    def apply(self) -> list[StepOutput]:
        """Execute the queued commands, then any changes that are due. Return the outputs of
        in-flight steps and of ended sequences.
        """
        ended, self._unread = self._unread + self._scheduler.expire(), []
        if self._waiting:
            self._scheduler.abandon()
        while self._waiting:
            ended += self._execute(self._waiting.popleft())
        ended += self._pushes.advance()
        if not self._gate.held_for(Reason.SETTLING):  # a pause that drains comes after the change
            ended += self._halt.advance()
        return ended

    def _execute(self, command: Command) -> list[StepOutput]:
        match command:
            case Submit(requests):
                return self._submit(requests)
            case Abort(ids, finish_reason, all):
                return self._scheduler.abort(ids, finish_reason, all=all)
            case Pause() | Resume() | Sleep() | WakeUp() | ClearCache():
                return self._halt.apply(command)
            case Recompute():
                with self._faults.containing("a wish to recompute states"):
                    if self._recomputing is not None:
                        self._recomputing.ask(command)
                return []
            case SetPolicy():
                self._set_policy(command)
                return []
            case Stop(drain):
                self.stopping = True
                return [] if drain else self._scheduler.abort([], all=True)
            case _:
                self._pushes.apply(command)
                return []

    def _submit(self, requests: list[GenerateRequest]) -> list[StepOutput]:
        """Queue the batch, all or none: if one request cannot run, all end with the reason."""
        try:
            if self._pushes.refusal is not None:
                raise self._pushes.refusal
            self._scheduler.submit([self._make_sequence(request) for request in requests])
        except Exception as cause:  # other requests must not suffer
            error = self._faults.typed(cause, f"a batch with request {requests[0].id}")
            return [last_output(r.id, "error", (error.code, error.message)) for r in requests]
        return []
