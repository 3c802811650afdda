"""The log of switches: when steps began to use another strategy, and why.

It observes the context and the strategy of every step from outside the policies. A switch's reason
is the change since the previous switch; a change in a policy's learned numbers counts as
`acceptance`. The engine's loop feeds the log and sends its entries.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tlt_server.speculation.policies.pinned import pinned_at
from tlt_server.wire.records import Pin, StepContext, Strategy, Switch, SwitchReason

BATCH, CONTEXT = 1.1, 1.25  # factors by which a batch, or its mean context, has changed
ROWS = 1.5  # factor of the rows per request from which a strategy counts as another one
SOON = 64  # steps in which a switch may be due to new weights
KEPT = 256  # switches that have not been taken


class _Used(NamedTuple):
    """The first step under a strategy."""

    strategy: Strategy
    context: StepContext
    pinned: bool


class SwitchLog:
    def __init__(self, pins: Sequence[Pin] = (), clock: Callable[[], float] = time.time) -> None:
        self._pins, self._clock = pins, clock
        self._used: _Used | None = None
        self._policy_is_new, self._weights_left = False, 0
        self._switches: deque[Switch] = deque(maxlen=KEPT)

    def policy_replaced(self, pins: Sequence[Pin]) -> None:
        self._pins, self._policy_is_new = pins, True

    def weights_changed(self) -> None:
        self._weights_left = SOON

    def chose(self, context: StepContext, strategy: Strategy) -> None:
        """Record the strategy of the next step, unless nothing in the step can take drafts."""
        if not context.speculable:
            return
        now = _Used(strategy, context, pinned_at(self._pins, context.decoding) is not None)
        if self._used is None or _is_another(self._used.strategy, strategy):
            before = self._used.strategy.name if self._used else ""
            reason = self._reason(self._used, now)
            self._switches.append(
                Switch(self._clock(), strategy.name, before, reason, context.decoding)
            )
            self._used = now
        self._policy_is_new, self._weights_left = False, max(0, self._weights_left - 1)

    def take(self) -> list[Switch]:
        """Return the switches since the last call, oldest first."""
        found = [*self._switches]
        self._switches.clear()
        return found

    def _reason(self, before: _Used | None, now: _Used) -> SwitchReason:
        if before is None:
            return "start"
        if self._policy_is_new:
            return "policy"
        if now.pinned or before.pinned:
            return "pin"
        if self._weights_left:
            return "weights"
        old, new = before.context, now.context
        if (old.prefill_rows > 0) != (new.prefill_rows > 0):
            return "prompts"
        if new.decoding >= BATCH * old.decoding:
            return "batch grew"
        if new.decoding <= old.decoding / BATCH:
            return "batch shrank"
        if not old.mean_context / CONTEXT < new.mean_context < old.mean_context * CONTEXT:
            return "context"
        return "acceptance"


def _is_another(before: Strategy, now: Strategy) -> bool:
    """Return True if the strategies differ. A policy that spreads rows over a batch changes their
    number slightly at almost every step; that is not a switch.
    """
    if (before.drafter, before.depth, before.width) != (now.drafter, now.depth, now.width):
        return True
    return not before.rows / ROWS < now.rows < before.rows * ROWS
