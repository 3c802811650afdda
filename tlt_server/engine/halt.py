"""Why the loop does not step: it was paused, or it sleeps and its memory is given back. The two are
independent of each other.

The loop hands every control command to `apply` and calls `advance` between steps; each command ends
in exactly one `ControlReport`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from tlt_server.engine.pushes import WeightPushes
from tlt_server.engine.scheduler import Scheduler
from tlt_server.errors import Conflict, TltError, Unavailable
from tlt_server.records import (
    ClearCache,
    ControlCommand,
    ControlReport,
    InFlight,
    Memory,
    Pause,
    Resume,
    Sleep,
    StepOutput,
    WakeUp,
)
from tlt_server.weights.dormant import Dormant


class Pages(Protocol):
    """The KV's memory; see `devices.Memory`."""

    @property
    def free(self) -> Callable[[], None]: ...

    @property
    def reclaim(self) -> Callable[[], None]: ...


class Halt:
    def __init__(
        self, scheduler: Scheduler, pages: Pages, pushes: WeightPushes, dormant: Dormant
    ) -> None:
        self._scheduler, self._pages, self._pushes, self._dormant = (
            scheduler,
            pages,
            pushes,
            dormant,
        )
        self.settle: Callable[[], list[StepOutput]] = (
            list  # takes in the steps in flight; the loop's
        )
        self._paused = False
        self._asleep: set[Memory] = set()
        self._draining: list[Pause | Sleep] = []  # not answered yet
        self._reports: list[ControlReport] = []
        self._ended: list[StepOutput] = []

    @property
    def due(self) -> bool:
        """A pause or sleep has waited for the end of what ran, and it has come."""
        return bool(self._draining) and self._scheduler.idle

    def take_reports(self) -> list[ControlReport]:
        reports, self._reports = self._reports, []
        return reports

    def apply(self, command: ControlCommand) -> list[StepOutput]:
        """Returns the sequences that end of it, and what the steps in flight gave."""
        match command:
            case Pause(_, in_flight) | Sleep(_, _, in_flight) if (
                in_flight == "drain" and not self._scheduler.idle
            ):
                self._draining.append(command)
            case _:
                self._answer(command)
        return self._take_ended()

    def advance(self) -> list[StepOutput]:
        """Between two steps: what waits for the end of what ran may have come to it."""
        if self.due:
            draining, self._draining = self._draining, []
            for command in draining:
                self._answer(command)
        return self._take_ended()

    def _answer(self, command: ControlCommand) -> None:
        """Done, or with an error nothing has changed."""
        try:
            self._do(command)
            self._report(command.id)
        except TltError as error:
            self._report(command.id, error)
        self._scheduler.paused = self._paused or bool(self._asleep)

    def _do(self, command: ControlCommand) -> None:
        match command:
            case Pause(_, in_flight, clear_cache):
                self._stop(in_flight)
                self._paused = True
                if clear_cache:
                    self._scheduler.forget_prefixes()
            case Resume():
                self._paused = False
                self._call_off(
                    [waiting for waiting in self._draining if isinstance(waiting, Pause)],
                    "resumed",
                    "paused",
                )
            case Sleep(_, memory, in_flight):
                self._sleep({*memory} - self._asleep, in_flight)
            case WakeUp(_, memory):
                self._wake({*memory} & self._asleep)
                self._call_off(
                    [
                        waiting
                        for waiting in self._draining
                        if isinstance(waiting, Sleep) and {*waiting.memory} & {*memory}
                    ],
                    "woken",
                    "put to sleep",
                )
            case ClearCache(_, unless_held):
                if unless_held and self._scheduler.holds_kv:
                    raise Conflict(
                        "sequences run, or are paused with their KV, which is not forgotten meanwhile; wait for them, abort "
                        "them, or pause with mode retract"
                    )
                self._scheduler.forget_prefixes()  # a step in flight of what has ended or was given up publishes nothing

    def _call_off(self, waiting: list[Pause | Sleep], by: str, never: str) -> None:
        for command in waiting:
            self._draining.remove(command)
            self._report(
                command.id,
                Conflict(
                    f"generation was {by} before everything had ended, so it was never {never}"
                ),
            )

    def _stop(self, in_flight: InFlight) -> None:
        self._ended += self.settle()
        if in_flight == "abort":
            self._ended += self._scheduler.abort([], all=True)
        elif in_flight == "recompute":
            self._scheduler.give_up_pages()

    def _sleep(self, memory: set[Memory], in_flight: InFlight) -> None:
        """Pages are given back whatever sleeps: without weights there is nothing to compute them
        with.
        """
        transaction = self._pushes.transaction
        if (
            memory and transaction.intake.groups.hold_gpu
        ):  # giving memory back waits for the whole GPU, and so for that trainer
            raise Conflict(
                "a group is being joined or brings weights through the GPU; wait for it, then put memory to sleep"
            )
        if "weights" in memory:
            if self._pushes.in_use:
                raise Conflict(
                    "a weight push, a rollback or a reading is under way; wait for it, then put the weights to sleep"
                )
            self._ended += self.settle()
            transaction.tidy(wait=True)
            self._dormant.put_away(transaction.live, transaction.previous)
            self._pushes.asleep = True
        if in_flight == "abort":
            self._stop("abort")
        if memory and not self._asleep:
            self._stop("recompute")
            self._pages.free()
        self._asleep |= memory

    def _wake(self, memory: set[Memory]) -> None:
        """Pages first: to give them back again cannot fail, to put weights away again can."""
        pages = bool(memory) and memory == self._asleep
        try:
            if pages:
                self._pages.reclaim()
            if "weights" in memory:
                try:
                    self._dormant.bring_back()
                except Exception:
                    if pages:
                        self._pages.free()
                    raise
        except torch.OutOfMemoryError:
            raise Unavailable(
                f"there is no room for {' and '.join(sorted(memory))} now, so that sleeps on; free the memory that others "
                "took meanwhile, then wake it again"
            ) from None
        self._pushes.asleep &= "weights" not in memory
        self._asleep -= memory

    def _take_ended(self) -> list[StepOutput]:
        ended, self._ended = self._ended, []
        return ended

    def _report(self, id: str, error: TltError | None = None) -> None:
        self._reports.append(ControlReport(id, (error.code, error.message) if error else None))
