"""The gate before each step: whether a step may run, for loop, scheduler, pauses and weight pushes.
No torch.

Each of them holds the gate for its reasons and releases it again; the state depends on the reasons
alone. Reasons are independent, except that no weight change is in progress while the weights sleep.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal

State = Literal["open", "draining", "closed"]


class Reason(Enum):
    """A reason to hold the gate. `DRAINING` only keeps new sequences from starting: all, or those
    with one adapter.
    """

    PAUSED = "an operator paused generation"
    KV_ASLEEP = "the KV's memory is given back"
    WEIGHTS_ASLEEP = "the weights wait in a file"
    WRITING = "weights are being written in place"
    IN_DOUBT = "the live weights of a role are no version"
    SETTLING = "the weights change in the next step; this one delivers what was in flight"
    DRAINING = "a change of weights waits for the end of what has started"


BY_OPERATOR = frozenset({Reason.PAUSED, Reason.KV_ASLEEP, Reason.WEIGHTS_ASLEEP})
BY_CHANGE = frozenset({Reason.WRITING, Reason.SETTLING, Reason.DRAINING})


class StepGate:
    """The reasons that hold it, and the state that follows."""

    def __init__(self) -> None:
        self._reasons: set[Reason] = set()
        self._drained = ""  # the adapter that `DRAINING` is about; empty: all sequences

    @property
    def state(self) -> State:
        """`open`: any sequence may start or continue. `draining`: only started ones continue.
        `closed`: no step runs.
        """
        if self._reasons - {Reason.DRAINING}:
            return "closed"
        return "draining" if self._reasons else "open"

    @property
    def closed(self) -> bool:
        return self.state == "closed"

    @property
    def by_operator(self) -> bool:
        """Return True if sequences wait for a resume or a wake-up."""
        return not self._reasons.isdisjoint(BY_OPERATOR)

    @property
    def asleep(self) -> bool:
        """Return True if memory is freed, so that nothing may use it."""
        return not self._reasons.isdisjoint({Reason.KV_ASLEEP, Reason.WEIGHTS_ASLEEP})

    def held_for(self, reason: Reason) -> bool:
        return reason in self._reasons

    def lets_start(self, adapter: str) -> bool:
        """Return True if new sequences with this adapter, or without one, may start."""
        if self.state == "draining":
            return self._drained not in ("", adapter)
        return not self.closed

    def hold(self, *reasons: Reason, adapter: str = "") -> None:
        """Add reasons. `DRAINING` keeps back new sequences with this adapter; all if it is
        empty.
        """
        self._reasons.update(reasons)
        if Reason.DRAINING in reasons:
            self._drained = adapter

    def release(self, *reasons: Reason) -> None:
        self._reasons.difference_update(reasons)

    def check(self) -> None:
        """Assert every invariant."""
        assert Reason.WEIGHTS_ASLEEP not in self._reasons or self._reasons.isdisjoint(BY_CHANGE), (
            f"weights change while they sleep: {self._reasons}"
        )
