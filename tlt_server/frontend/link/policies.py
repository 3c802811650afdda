"""The active policy and the one in preparation, by the engine's answers. Both last over restarts:
each epoch prepares the active one again, then the pending one. A policy whose preparation was
interrupted by two deaths in a row may be their cause, and is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import structlog

from tlt_server.errors import Conflict, EngineFailed, from_code
from tlt_server.frontend.link.answers import Answers
from tlt_server.wire.commands import Command, SetPolicy
from tlt_server.wire.events import ControlReport

log = structlog.get_logger()


class PolicyState:
    def __init__(self, command_id: Callable[[], str], send: Callable[[Command], bool]) -> None:
        """`send`: returns whether there is an engine to take the command."""
        self._command_id, self._send = command_id, send
        self.answers = Answers[ControlReport](self._sent)
        self._asked: dict[str, SetPolicy] = {}  # sent and without an answer, the newest last
        self._kept: SetPolicy | None = None  # the last one in force, of any epoch
        self._next: SetPolicy | None = None  # to be sent once the one in force is there again
        self._suspect: SetPolicy | None = None  # the last one being prepared at a death
        self.in_force: SetPolicy | None = None  # None: the one that the engine was started with
        self.prepared = ""  # what the policy in force found prepared

    @property
    def preparing(self) -> SetPolicy | None:
        """Return the policy in preparation, or waiting for it."""
        return self._next or self._newest

    @property
    def _newest(self) -> SetPolicy | None:
        return next(reversed(self._asked.values()), None)

    async def ask(self, policy: SetPolicy, patience_s: float) -> None:
        """Return when the policy is active, or after `patience_s`. Raises the engine's error."""
        command = msgspec.structs.replace(policy, id=self._command_id())
        answer = asyncio.ensure_future(self.answers.ask(command))
        answer.add_done_callback(_take_error)
        done, _ = await asyncio.wait({answer}, timeout=patience_s)
        if done and (report := answer.result()).error is not None:
            raise from_code(*report.error)

    def answered(self, report: ControlReport) -> bool:
        """Apply the answer to a policy, even if its caller has left. Return False for other
        answers.
        """
        command = self._asked.pop(report.id, None)
        if command is None:
            return False
        if _equal(command, self._suspect) and not _equal(command, self._newest):
            self._suspect = None
        if report.error is None:
            self.in_force, self.prepared, self._kept = command, report.detail, command
        elif command.id not in self.answers:
            log.warning("policy_refused", policy=command.name, message=report.error[1])
        self.answers.settle(report)
        if self._next is not None and not self._asked:
            command, self._next = self._next, None
            self._give(command)
        return True

    def died(self, reason: str) -> None:
        """End every wait, and keep the policies for the next epoch."""
        command, again, dropped = self._newest, self._suspect, ""
        self._asked = {}
        if command is not None:
            self._suspect = command
            if _equal(command, again):
                self._suspect, dropped = None, command.name
                log.error("policy_dropped", policy=command.name, reason=reason)
            if _equal(command, self._kept):
                self._kept = None if dropped else self._kept
            elif not dropped:
                self._next = command
        self.answers.fail(lambda: _cut_off(reason, dropped))

    def begin(self, prepared: str) -> None:
        """Begin an epoch, which starts with the configured policy: send the one that was active,
        then the pending one.
        """
        self.in_force, self.prepared, self._asked = None, prepared, {}
        first = self._kept or self._next
        if self._kept is None:
            self._next = None
        if first is not None:
            self._give(first)

    def _sent(self, command: Command) -> bool:
        """Send a policy, or keep it until the active one is prepared, whose preparation it would
        end. A newer one replaces it.
        """
        assert isinstance(command, SetPolicy)
        again = self._kept is not None and self.in_force is None and self._kept.id in self._asked
        if not again:
            sent = self._give(command)
            if not sent:
                del self._asked[command.id]
            return sent
        if self._next is not None:
            error = Conflict(
                f"policy {self._next.name} had not been prepared when another was set; see GET "
                "/strategy"
            )
            self.answers.settle(ControlReport(self._next.id, (error.code, error.message)))
        self._next = command
        return True

    def _give(self, command: SetPolicy) -> bool:
        self._asked[command.id] = command
        return self._send(command)


def _equal(command: SetPolicy, other: SetPolicy | None) -> bool:
    """Return True if both ask for the same policy."""
    return other is not None and command == msgspec.structs.replace(other, id=command.id)


def _cut_off(reason: str, dropped: str) -> EngineFailed:
    then = "GET /strategy says which policy is in force once the engine is back"
    if dropped:
        then = (
            f"policy {dropped} was being prepared at 2 deaths of the engine and is dropped; {then}"
        )
    return EngineFailed(f"{reason}; {then}")


def _take_error(answer: asyncio.Future[ControlReport]) -> None:
    """Let the error of an answer without a caller end without a warning."""
    if not answer.cancelled():
        answer.exception()
