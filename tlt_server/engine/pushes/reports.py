"""Answers to weight commands: one `WeightReport` each, with the state at the time of the answer."""

from __future__ import annotations

from collections import deque
from typing import Any

from tlt_server.errors import TltError
from tlt_server.weights.parts import Changed
from tlt_server.weights.transaction import Transaction
from tlt_server.weights.update import Push
from tlt_server.wire.events import WeightReport, WeightState


class WeightReports:
    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._reports: deque[WeightReport] = deque()  # appended to by threads, too

    def take(self) -> list[WeightReport]:
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def answer(self, push: Push, result: str, **said: Any) -> None:
        """Answer every command that asked for this push, as `report` does. If there was none, send
        a report with an empty id.
        """
        said |= {"version": push.version, "role": push.manifest.role, "phases": dict(push.phases)}
        for id in push.asked or [""]:
            self.report(id, result, **said)
        push.asked.clear()

    def refuse(self, id: str, error: TltError, *, version: str = "", role: str = "") -> None:
        self.report(id, error.code, error=error, version=version, role=role)

    def report(
        self,
        id: str,
        result: str,
        *,
        parts: Changed | None = None,
        error: TltError | None = None,
        **said: Any,
    ) -> None:
        """`parts`: the weights that the answer describes, instead of `version` and `role`. `said`:
        further fields of the report; `state` is the push's state, by default the current one.
        """
        if parts is not None:
            said = {"checksums": parts.sums} | said | {"version": parts.version, "role": parts.role}
        said = {"state": self.state()} | said
        code = (error.code, error.message) if error is not None else None
        self._reports.append(WeightReport(id=id, result=result, error=code, **said))

    def state(self) -> WeightState:
        versions, push = self._transaction.versions, self._transaction.push
        options = self._transaction.options
        return WeightState(
            target=versions.live.target.version,
            quantization=versions.live.target.quantization,
            drafter=versions.live.drafter_version,
            drafter_quantization=versions.live.drafter_quantization,
            previous={role: part.version for role, part in versions.previous.by_role.items()},
            open={"version": push.version, "role": push.manifest.role, "state": push.state.name}
            if push
            else {},
            spooled=options.spool is not None,
            quarantined=dict(versions.quarantined),
            groups=sorted(options.intake.groups),
            adapters={name: part.version for name, part in versions.live.adapters.items()},
            sockets=str(options.intake.sockets or ""),
        )
