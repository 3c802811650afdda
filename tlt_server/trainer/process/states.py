"""The states of the trainer, and the quiet time after which it continues. No torch, and clocks are
passed in.

`StateMachine` is asked between two segments. It parks as soon as the engine has work, keeps
half-done work, and continues it once the engine has been idle for the quiet time. That time doubles
if work returns sooner than it lasted, and shrinks again later.
"""

from __future__ import annotations

from collections.abc import Callable

from tlt_server.wire.training import TrainerState

LEAST_QUIET_S, MOST_QUIET_S = 0.2, 30.0

_S = TrainerState
WORKING = frozenset({_S.TRAINING, _S.EVALUATING})
_ALWAYS = frozenset({_S.PAUSED, _S.FAILED})
NEXT: dict[TrainerState, frozenset[TrainerState]] = {
    _S.IDLE: frozenset({_S.TRAINING}) | _ALWAYS,
    _S.TRAINING: frozenset({_S.EVALUATING, _S.PARKING, _S.IDLE}) | _ALWAYS,
    _S.EVALUATING: frozenset({_S.ADOPTING, _S.PARKING, _S.IDLE}) | _ALWAYS,
    _S.PARKING: frozenset({_S.PARKED}) | _ALWAYS,
    _S.PARKED: WORKING | {_S.IDLE} | _ALWAYS,
    _S.ADOPTING: frozenset({_S.IDLE}) | _ALWAYS,
    _S.PAUSED: frozenset({_S.IDLE, _S.PARKED}) | _ALWAYS,
    _S.FAILED: frozenset({_S.IDLE}) | _ALWAYS,
}


def quiet_after(quiet_s: float, worked_s: float) -> float:
    """Return how long the engine must be idle after a request has interrupted the work."""
    if worked_s < quiet_s:
        return min(2 * quiet_s, MOST_QUIET_S)
    return max(quiet_s / 2, LEAST_QUIET_S)


class StateMachine:
    """The state, and whether a segment may run."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self.quiet_s = clock, LEAST_QUIET_S
        self.state, self.reason = TrainerState.IDLE, ""
        self.parkings = 0
        self._half_done: TrainerState | None = None  # the work that goes on after a park
        self._idle_since_s: float | None = None  # None: the engine is busy
        self._resumed_s = clock()

    def enter(self, state: TrainerState, reason: str = "") -> None:
        assert state == self.state or state in NEXT[self.state], f"{self.state} to {state}"
        self.state, self.reason = state, reason
        if state in WORKING:
            self._half_done = state
        elif state in (TrainerState.IDLE, TrainerState.ADOPTING, TrainerState.FAILED):
            self._half_done = None

    def may_run(self, *, busy: bool) -> bool:
        """Return True if a segment may run now. After False the state may be `PARKING`: the caller
        then releases the device and calls `parked`.
        """
        now_s = self._clock()
        if busy:
            self._idle_since_s = None
            if self.state in WORKING:
                self.quiet_s = quiet_after(self.quiet_s, now_s - self._resumed_s)
                self.enter(TrainerState.PARKING)
            return False
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        if self.state in WORKING:
            return True
        if now_s - self._idle_since_s < self.quiet_s:
            return False
        if self.state == TrainerState.PARKED:
            assert self._half_done is not None
            self.enter(self._half_done)
        elif self.state != TrainerState.IDLE:
            return False
        self._resumed_s = now_s
        return True

    def parked(self) -> None:
        self.parkings += 1
        self.enter(TrainerState.PARKED)

    def pause(self, reason: str) -> None:
        """Pause until `resume`, and keep a half-done round."""
        self.enter(TrainerState.PAUSED, reason)

    def resume(self) -> None:
        """Continue after a pause or a failure; has no effect in other states."""
        if self.state == TrainerState.PAUSED and self._half_done is not None:
            self.enter(TrainerState.PARKED)
        elif self.state in (TrainerState.PAUSED, TrainerState.FAILED):
            self.enter(TrainerState.IDLE)

    def drop(self) -> None:
        """Drop the half-done round: it was abandoned."""
        self._half_done = None
        if self.state in WORKING or self.state in (TrainerState.PARKED, TrainerState.ADOPTING):
            self.enter(TrainerState.IDLE)
