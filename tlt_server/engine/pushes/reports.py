"""Answers to weight commands: one `WeightReport` each, with how things stand when it is made."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

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

    def answer(
        self,
        push: Push,
        result: str,
        *,
        parts: Changed | None = None,
        error: TltError | None = None,
        pause_ms: float = 0.0,
    ) -> None:
        """Answer every command that asked for this push. If none did, there is a report with an
        empty id.
        """
        for id in push.asked or [""]:
            self.report(
                id,
                result,
                parts=parts,
                error=error,
                version=push.version,
                role=push.manifest.role,
                phases=push.phases,
                pause_ms=pause_ms,
            )
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
        version: str = "",
        role: str = "",
        checksums: Mapping[str, str] | None = None,
        phases: Mapping[str, float] | None = None,
        pause_ms: float = 0.0,
        values: bytes = b"",
        shape: Sequence[int] = (),
        state: WeightState | None = None,
    ) -> None:
        """`parts`: the weights that the answer is about, instead of `version` and `role`. `state`:
        how things stood for it; None: as they do now.
        """
        sums = parts.sums if parts and checksums is None else checksums
        self._reports.append(
            WeightReport(
                id=id,
                state=state or self.state(),
                result=result,
                error=(error.code, error.message) if error else None,
                version=parts.version if parts else version,
                role=parts.role if parts else role,
                checksums=dict(sums or {}),
                phases=dict(phases or {}),
                pause_ms=pause_ms,
                values=values,
                shape=list(shape),
            )
        )

    def state(self) -> WeightState:
        versions, push = self._transaction.versions, self._transaction.push
        options = self._transaction.options
        return WeightState(
            target=versions.live.target.version,
            drafter=versions.live.drafter.version if versions.live.drafter else "",
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
