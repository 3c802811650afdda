"""Pauses and sleeps: an operator's reasons to hold the gate, and the memory meanwhile. The two are
independent.

Every control command goes to `apply`, and `advance` is called between steps; each command ends in
exactly one `ControlReport`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from tlt_server.engine.gate import Reason, StepGate
from tlt_server.engine.pushes.pushes import WeightPushes
from tlt_server.engine.schedule.scheduler import Scheduler
from tlt_server.errors import Conflict, EngineFailed, TltError, Unavailable
from tlt_server.weights.dormant import Dormant
from tlt_server.wire.commands import (
    ClearCache,
    ControlCommand,
    InFlight,
    Memory,
    Pause,
    Resume,
    Sleep,
    WakeUp,
)
from tlt_server.wire.events import ControlReport
from tlt_server.wire.records import StepOutput

ASLEEP: dict[Memory, Reason] = {"weights": Reason.WEIGHTS_ASLEEP, "kv_cache": Reason.KV_ASLEEP}


class DeviceMemory(Protocol):
    """The memory of the device; see `devices.Equipment`."""

    def free(self) -> None: ...

    def reclaim(self) -> None: ...

    def forget(self) -> None: ...


class Halt:
    def __init__(
        self,
        gate: StepGate,
        scheduler: Scheduler,
        device: DeviceMemory,
        pushes: WeightPushes,
        dormant: Dormant,
        settle: Callable[[], list[StepOutput]],
    ) -> None:
        """`settle` commits the steps in flight."""
        self._gate, self._scheduler, self._device = gate, scheduler, device
        self._pushes, self._dormant, self._settle = pushes, dormant, settle
        self._draining: list[Pause | Sleep] = []  # not answered yet
        self._reports: list[ControlReport] = []
        self._ended: list[StepOutput] = []

    @property
    def due(self) -> bool:
        """Return True if a pause or sleep was waiting for running sequences and none is left."""
        return bool(self._draining) and self._scheduler.idle

    def take_reports(self) -> list[ControlReport]:
        reports, self._reports = self._reports, []
        return reports

    def apply(self, command: ControlCommand) -> list[StepOutput]:
        """Return the sequences that this ends, and the outputs of the in-flight steps."""
        match command:
            case Pause(_, in_flight) | Sleep(_, _, in_flight) if (
                in_flight == "drain" and not self._scheduler.idle
            ):
                self._draining.append(command)
            case _:
                self._answer(command)
        return self._take_ended()

    def advance(self) -> list[StepOutput]:
        """Execute, between two steps, the commands that waited for running sequences."""
        if self.due:
            draining, self._draining = self._draining, []
            for command in draining:
                self._answer(command)
        return self._take_ended()

    def _answer(self, command: ControlCommand) -> None:
        """Execute the command. After an error, which is reported, nothing has changed."""
        try:
            self._do(command)
            self.report(command.id)
        except EngineFailed:
            raise  # something has changed, so the next epoch begins
        except TltError as error:
            self.report(command.id, error)
        except Exception as error:
            if isinstance(command, Sleep | WakeUp):  # no check tells what memory is there
                raise
            name = type(command).__name__
            self.report(command.id, self._scheduler.faults.contain(error, f"a {name} command"))

    def _do(self, command: ControlCommand) -> None:
        match command:
            case Pause(_, in_flight, clear_cache):
                self._stop(in_flight)
                self._gate.hold(Reason.PAUSED)
                if clear_cache:
                    self._forget()
            case Resume():
                self._gate.release(Reason.PAUSED)
                pauses = [waits for waits in self._draining if isinstance(waits, Pause)]
                self._call_off(pauses, "resumed", "paused")
            case Sleep(_, memory, in_flight):
                self._sleep({*memory} - self._asleep, in_flight)
            case WakeUp(_, memory):
                self._wake({*memory} & self._asleep)
                sleeps = [waits for waits in self._draining if isinstance(waits, Sleep)]
                called_off = [sleep for sleep in sleeps if {*sleep.memory} & {*memory}]
                self._call_off(called_off, "woken", "put to sleep")
            case ClearCache(_, unless_held):
                if unless_held and self._scheduler.holds_kv:
                    raise Conflict(
                        "sequences run, or are paused with their KV, which cannot be forgotten "
                        "meanwhile; wait for them, abort them, or pause with in_flight recompute"
                    )
                self._forget()

    def _forget(self) -> None:
        """Drop cached prefixes and the text of earlier requests. KV that an in-flight step computes
        for an ended sequence is not published.
        """
        self._scheduler.forget_prefixes()
        self._device.forget()

    def _call_off(self, waiting: Iterable[Pause | Sleep], by: str, never: str) -> None:
        for command in waiting:
            self._draining.remove(command)
            self.report(
                command.id,
                Conflict(
                    f"generation was {by} before everything had ended, so it was never {never}"
                ),
            )

    def _stop(self, in_flight: InFlight) -> None:
        self._ended += self._settle()
        if in_flight == "abort":
            self._ended += self._scheduler.abort([], all=True)
        elif in_flight == "recompute":
            self._scheduler.give_up_pages()

    @property
    def _asleep(self) -> set[Memory]:
        return {memory for memory, reason in ASLEEP.items() if self._gate.held_for(reason)}

    def _sleep(self, memory: set[Memory], in_flight: InFlight) -> None:
        """Free the memory. Pages are freed with either kind, as nothing can be computed for them
        without weights.
        """
        transaction = self._pushes.transaction
        if memory and transaction.options.intake.groups.hold_gpu:
            # Giving memory back waits for the whole GPU, and so for that trainer.
            raise Conflict(
                "a group is being joined or brings weights through the GPU; wait for it, then put "
                "memory to sleep"
            )
        awake = not self._asleep
        if "weights" in memory:
            if self._pushes.in_use:
                raise Conflict(
                    "a weight push, a rollback or a read is in progress; wait for it, then put "
                    "the weights to sleep"
                )
            self._ended += self._settle()
            transaction.cleanup.run(wait=True)
            self._dormant.put_away(transaction.versions.live, transaction.versions.previous)
        self._gate.hold(*(ASLEEP[each] for each in memory))
        if in_flight == "abort":
            self._stop("abort")
        if memory and awake:
            self._stop("recompute")
            self._device.free()

    def _wake(self, memory: set[Memory]) -> None:
        """Allocate the memory again, pages first: freeing them cannot fail, offloading weights
        can.
        """
        pages = bool(memory) and memory == self._asleep
        try:
            if pages:
                self._device.reclaim()
            if "weights" in memory:
                try:
                    self._dormant.bring_back()
                except EngineFailed:  # a rank is gone, and would be waited for again
                    raise
                except Exception:
                    if pages:
                        self._device.free()
                    raise
        except torch.OutOfMemoryError:
            raise Unavailable(
                f"there is no room for {' and '.join(sorted(memory))} now, so it stays asleep; "
                "free the memory that other programs took, then wake it again"
            ) from None
        self._gate.release(*(ASLEEP[each] for each in memory))

    def _take_ended(self) -> list[StepOutput]:
        ended, self._ended = self._ended, []
        return ended

    def report(self, id: str, error: TltError | None = None) -> None:
        self._reports.append(ControlReport(id, (error.code, error.message) if error else None))
