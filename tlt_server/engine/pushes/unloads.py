"""Adapters being unloaded: new sequences cannot use them, and their slots become free once their
last sequences have ended.
"""

from __future__ import annotations

from tlt_server.engine.pushes.reports import WeightReports
from tlt_server.engine.schedule.scheduler import Scheduler
from tlt_server.errors import Conflict, NotFound, TltError
from tlt_server.weights.transaction import Transaction
from tlt_server.wire.commands import UnloadAdapter
from tlt_server.wire.records import LoadedAdapter, StepOutput


class Unloads:
    def __init__(
        self, transaction: Transaction, scheduler: Scheduler, reports: WeightReports
    ) -> None:
        self._transaction, self._scheduler, self._reports = transaction, scheduler, reports
        self._waiting: dict[str, list[str]] = {}  # adapter -> ids of the commands

    @property
    def due(self) -> bool:
        """Return True if an adapter to be unloaded has no more users."""
        return bool(self._unused())

    def adapter(self, name: str) -> LoadedAdapter | None:
        """Return the adapter of this name for a new sequence; None for an empty name. `NotFound`
        for an unknown one.
        """
        return self._usable(name) if name else None

    def _usable(self, name: str) -> LoadedAdapter:
        adapter = self._transaction.versions.live.adapters.get(name)
        if adapter is None or name in self._waiting:
            raise NotFound(
                f"adapter {name[:100]!r} is not loaded; load it first (POST /update_weights with "
                "role adapter, POST /v1/load_lora_adapter)"
            )
        return adapter.loaded

    def ask(self, command: UnloadAdapter) -> list[StepOutput]:
        """Unload the adapter once its last sequence has ended; return the sequences that this ends
        now.
        """
        name, push = command.name, self._transaction.push
        if name not in self._waiting:
            self._usable(name)
        if push is not None and push.manifest.adapter == name:
            raise Conflict(
                f"adapter {name!r} is being pushed; wait for the push or abort it, then unload it"
            )
        self._waiting.setdefault(name, []).append(command.id)
        if command.in_flight == "drain":
            return []
        return self._scheduler.abort([sequence.id for sequence in self._scheduler.using(name)])

    def check_free(self, name: str) -> None:
        """Raise `Conflict` if the adapter is being unloaded."""
        if name in self._waiting:
            raise Conflict(
                f"adapter {name!r} is being unloaded; push it again once its last request has ended"
            )

    def advance(self) -> None:
        """Unload adapters without users."""
        for name in self._unused():
            ids = self._waiting.pop(name)
            try:
                self._transaction.versions.unload(name)
            except TltError as error:
                for id in ids:
                    self._reports.refuse(id, error, role="adapter")
            else:
                for id in ids:
                    self._reports.report(id, "unloaded", role="adapter")

    def _unused(self) -> list[str]:
        """Return the adapters to unload now. A push in progress is recorded first."""
        if self._transaction.push is not None:
            return []
        return [name for name in self._waiting if not self._scheduler.using(name)]
