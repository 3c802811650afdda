"""Changes of the policy. A policy is activated between two steps, once the kernels of its
strategies are prepared; until then the old policy chooses and steps continue.

Each command with an id is answered by one `ControlReport`. A newer command replaces one in
preparation; an equal command waits with it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from tlt_server.errors import Conflict, TltError
from tlt_server.process.faults import Containment
from tlt_server.speculation.policies import Policy
from tlt_server.speculation.sizes import Reach
from tlt_server.wire.commands import SetPolicy
from tlt_server.wire.events import ControlReport


class Preparation(Protocol):
    """The kernels and graphs that a policy's strategies need and the device lacks."""

    @property
    def stage(self) -> str:
        """Describe the current stage."""

    @property
    def taken(self) -> str:
        """Describe the finished preparation."""

    def advance(self) -> bool:
        """Do a part between two steps. Return True if everything is prepared."""

    def stop(self) -> None:
        """Give up."""


Prepare = Callable[[Reach], Preparation | None]  # None: nothing is lacking


class Change(NamedTuple):
    command: SetPolicy
    policy: Policy
    preparation: Preparation | None
    asked_s: float
    ids: list[str]  # every command that asks for it


class PolicyChanges:
    def __init__(
        self,
        make_policy: Callable[[SetPolicy], Policy],
        prepare: Prepare,
        prepared: Callable[[Reach], str],
        may_prepare: Callable[[], bool],
        faults: Containment,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`prepared`: see `devices.Equipment`. `may_prepare`: whether the device may be used
        between two steps, that is, no memory sleeps and no push is in progress.
        """
        self._make_policy, self._prepare, self._prepared = make_policy, prepare, prepared
        self._may_prepare, self._faults, self._clock = may_prepare, faults, clock
        self._change: Change | None = None
        self._reports: list[ControlReport] = []

    @property
    def stage(self) -> str:
        """Describe the current preparation; empty if there is none."""
        change = self._change
        return change.preparation.stage if change and change.preparation else ""

    @property
    def due(self) -> bool:
        """Return True if a part can be prepared now."""
        return bool(self.stage) and self._may_prepare()

    def gauges(self) -> dict[str, float]:
        return {"policy_preparing": float(bool(self.stage))}

    def ask(self, command: SetPolicy) -> None:
        """Start a change. A refused one leaves the current preparation unchanged."""
        before = self._change
        if before is not None and _bare(before.command) == _bare(command):
            before.ids.append(command.id)
            return
        try:
            policy = self._make_policy(command)
            preparation = self._prepare(policy.strategies)
        except Exception as error:
            typed = self._faults.typed(error, f"a change to policy {command.name}")
            self._refuse(command, [command.id], typed)
            return
        if before is not None:
            self._replace(before)
        self._change = Change(command, policy, preparation, self._clock(), [command.id])
        if preparation is not None:
            print(
                f"tlt: policy {command.name} is being prepared; the one before stays until then",
                file=sys.stderr,
            )

    def advance(self) -> Change | None:
        """Prepare a part, between two steps. Return a change that takes effect now."""
        change = self._change
        if change is None or (change.preparation and not self._may_prepare()):
            return None
        command, policy, preparation, asked_s, ids = change
        try:
            if preparation and not preparation.advance():
                return None
            described = self._prepared(policy.strategies)
        except Exception as error:
            self._change = None
            if preparation:
                preparation.stop()
            self._refuse(command, ids, self._faults.typed(error, f"policy {command.name}"))
            return None
        self._change = None
        if preparation:
            described = f"{preparation.taken}, in {self._clock() - asked_s:.1f} s; {described}"
        print(f"tlt: policy {command.name} is in force: {described}", file=sys.stderr)
        self._report(ids, detail=described)
        return change

    def take_reports(self) -> list[ControlReport]:
        """Return the answers since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def _replace(self, change: Change) -> None:
        """Answer a change that was replaced before it took effect."""
        if change.preparation is None:  # it would have been active for no step
            self._report(change.ids)
            return
        change.preparation.stop()
        error = Conflict(
            f"policy {change.command.name} was still being prepared when another was set; see GET "
            "/strategy"
        )
        self._refuse(change.command, change.ids, error)

    def _refuse(self, command: SetPolicy, ids: list[str], error: TltError) -> None:
        print(
            f"tlt: policy {command.name} is refused, {error.message}; the one in use stays",
            file=sys.stderr,
        )
        self._report(ids, (error.code, error.message))

    def _report(
        self, ids: list[str], error: tuple[str, str] | None = None, detail: str = ""
    ) -> None:
        self._reports += [ControlReport(id, error, detail=detail) for id in ids if id]


def _bare(command: SetPolicy) -> SetPolicy:
    """Return a command without its id."""
    return msgspec.structs.replace(command, id="")
