"""The policy in force and the one that the engine prepares, as the engine's answers say. The last
policy that was asked for holds over restarts: each epoch prepares it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from tlt_server.commands import SetPolicy
from tlt_server.errors import from_code
from tlt_server.events import ControlReport


class PolicyState:
    def __init__(
        self, command_id: Callable[[], str], ask: Callable[[SetPolicy], Awaitable[ControlReport]]
    ) -> None:
        """`ask` sends a command before it waits for its answer."""
        self._command_id, self._ask = command_id, ask
        self._asked: dict[str, SetPolicy] = {}  # without an answer, the newest last
        self.in_force: SetPolicy | None = None  # None: the one that the engine was started with
        self.prepared = ""  # what the policy in force found prepared

    @property
    def preparing(self) -> SetPolicy | None:
        """Return the policy that the engine prepares."""
        return next(reversed(self._asked.values()), None)

    async def ask(self, policy: SetPolicy, patience_s: float) -> None:
        """Return when the policy is in force, or after `patience_s`. Raises the engine's error."""
        command = msgspec.structs.replace(policy, id=self._command_id())
        self._asked[command.id] = command
        answer = asyncio.ensure_future(self._ask(command))
        answer.add_done_callback(_take_error)
        done, _ = await asyncio.wait({answer}, timeout=patience_s)
        if not done:
            return
        if answer.exception() is not None:
            self._asked.pop(command.id, None)
        report = answer.result()
        if report.error is not None:
            raise from_code(*report.error)

    def answered(self, report: ControlReport) -> None:
        """Take the answer to a policy, also when its caller has gone."""
        command = self._asked.pop(report.id, None)
        if command is not None and report.error is None:
            self.in_force, self.prepared = command, report.detail

    def begin(self, prepared: str) -> SetPolicy | None:
        """Begin an epoch, which starts with its own policy. Return what it is to be sent."""
        command = self.preparing or self.in_force
        self._asked = {command.id: command} if command else {}
        self.in_force, self.prepared = None, prepared
        return command


def _take_error(answer: asyncio.Future[ControlReport]) -> None:
    """Let the error of an answer without a caller end without a warning."""
    if not answer.cancelled():
        answer.exception()
