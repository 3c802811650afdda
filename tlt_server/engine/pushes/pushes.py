"""Weight commands for the loop: calls the transaction, waits for the right moment, and installs new
weights in scheduler, runner and drafters.

`advance` runs between two steps; there a commit is one swap of complete weights. With staging in
place no step runs between the first write and the end of the push, and after a failure none until
the next commit. Every command ends in exactly one `WeightReport`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import NamedTuple

from tlt_server.engine.gate import Reason, StepGate
from tlt_server.engine.pushes.group_joins import GroupJoins
from tlt_server.engine.pushes.reads import WeightReads
from tlt_server.engine.pushes.reports import WeightReports
from tlt_server.engine.pushes.unloads import Unloads
from tlt_server.engine.schedule.scheduler import Scheduler
from tlt_server.errors import Conflict, TltError, Unavailable
from tlt_server.speculation.cost import CostRecord
from tlt_server.weights.parts import Changed, Live
from tlt_server.weights.transaction import Transaction
from tlt_server.weights.update import FailedPush, Gathering, Push, Staged, Unchanged, Waiting
from tlt_server.wire.commands import (
    AbortWeights,
    CommitWeights,
    HandOver,
    InFlight,
    JoinGroup,
    LeaveGroup,
    LookAtWeights,
    NameWeights,
    PushWeights,
    ReadWeights,
    RollbackWeights,
    UnloadAdapter,
    WeightCommand,
)
from tlt_server.wire.events import WeightReport, WeightState
from tlt_server.wire.labels import label_of
from tlt_server.wire.records import StepOutput


class _Rollback(NamedTuple):
    """A rollback that waits for running sequences to end, or for readers of the live storage."""

    id: str
    in_flight: InFlight
    parts: Changed


class WeightPushes:
    def __init__(
        self,
        gate: StepGate,
        transaction: Transaction,
        scheduler: Scheduler,
        install: Callable[[Live, Changed], None],
        settle: Callable[[], list[StepOutput]],
        confirm: Callable[[], None] = lambda: None,
        costs: Callable[[], CostRecord | None] = lambda: None,
    ) -> None:
        """`install(live, changed)` makes runner and drafters use `live`, in which the roles of
        `changed` are new. `settle` commits the steps in flight. `confirm` waits for all ranks.
        `costs` returns the time of steps.
        """
        self._gate, self.transaction, self._scheduler = gate, transaction, scheduler
        self._install, self._settle, self._confirm = install, settle, confirm
        self.reports = WeightReports(transaction)
        self._reads = WeightReads(transaction.versions, self.reports, costs)
        self._joins = GroupJoins(transaction, self.reports)
        self.unloads = Unloads(transaction, scheduler, self.reports)
        self._rollback: _Rollback | None = None
        self._ended: list[StepOutput] = []

    @property
    def due(self) -> bool:
        """Return True if a change needs the next step, without a command."""
        held = self._gate.held_for(Reason.SETTLING)
        return held or self.transaction.cleanup.due or self.unloads.due

    @property
    def busy(self) -> bool:
        """Return True if threads are working and no command will announce their end."""
        return self.in_use or self._reads.working or self._joins.busy

    @property
    def in_use(self) -> bool:
        """Return True if weights are being read, or a push or rollback is in progress."""
        push = self.transaction.push
        return (
            self._changing
            or self._reads.busy
            or (push is not None and (push.brings_bytes or push.manifest.commit))
        )

    @property
    def _changing(self) -> bool:
        """Return True if the live storage is changing, or about to change."""
        push = self.transaction.push
        if self._rollback is not None or push is None:
            return self._rollback is not None
        in_place = self.transaction.options.storage.in_place
        return in_place or (isinstance(push.state, Staged) and push.to_commit)

    @property
    def refusal(self) -> Unavailable | None:
        """The error for new requests while a role's live weights are quarantined."""
        reasons = "; ".join(self.transaction.versions.quarantined.values())
        return (
            Unavailable(f"nothing is generated: {reasons}; push that version, or another")
            if reasons
            else None
        )

    def take_reports(self) -> list[WeightReport]:
        return self.reports.take()

    def state(self) -> WeightState:
        return self.reports.state()

    # -- commands ----------------------------------------------------------------------------------

    def apply(self, command: WeightCommand) -> None:
        try:
            self._check_awake(command)
            self._apply(command)
        except Exception as cause:
            error = self._scheduler.faults.typed(cause, f"a {type(command).__name__} command")
            if isinstance(command, PushWeights):
                self._refuse(command, error)
            else:
                self.reports.refuse(command.id, error)

    def _check_awake(self, command: WeightCommand) -> None:
        asleep = self._gate.held_for(Reason.WEIGHTS_ASLEEP)
        needs_none = isinstance(command, AbortWeights | JoinGroup | LeaveGroup)
        if asleep and not needs_none and command != LookAtWeights(command.id):
            raise Conflict(
                "the weights sleep; wake them first (POST /engine/wake with "
                '{"memory": ["weights"]})'
            )

    def _refuse(self, command: PushWeights, error: TltError) -> None:
        manifest = command.manifest
        self.transaction.refuse(manifest)
        if manifest.group:
            error = type(error)(
                f"{error.message}; nothing takes what group {manifest.group!r} brings of it, so it "
                "is left: join it again"
            )
        self.reports.refuse(command.id, error, version=manifest.version, role=manifest.role)

    def _apply(self, command: WeightCommand) -> None:
        match command:
            case PushWeights():
                self._push(command)
            case CommitWeights():
                self._ask_commit(command)
            case RollbackWeights():
                self._ask_rollback(command)
            case UnloadAdapter():
                self._check_drains(command.in_flight, adapter=command.name)
                self._ended += self.unloads.ask(command)
            case AbortWeights():
                self._abort(command)
            case NameWeights():
                self._name(command)
            case LookAtWeights():
                self._reads.look(command, changing=self._changing)
            case ReadWeights():
                self._reads.read(command, changing=self._changing)
            case HandOver():
                self._reads.hand_over(command, changing=self._changing)
            case JoinGroup():
                self._joins.join(command)
            case LeaveGroup():
                self._joins.leave(command)

    def _push(self, command: PushWeights) -> None:
        self._check_no_rollback()
        manifest = command.manifest
        self.unloads.check_free(manifest.adapter)
        push = self.transaction.begin(manifest)
        waits = isinstance(push.state, Waiting)
        if waits and manifest.commit and not (push.asked or push.candidate.headless):
            self._check_can_drain(push)
        push.asked.append(command.id)
        if waits and not self.transaction.options.storage.in_place:
            self.transaction.start()

    def _check_can_drain(self, push: Push) -> None:
        """Reject the push now if its commit would be rejected later."""
        try:
            self._check_drains(push.manifest.in_flight, push.manifest.roles, push.manifest.adapter)
        except Conflict:
            self.transaction.close()
            self._release()
            raise

    def _ask_commit(self, command: CommitWeights) -> None:
        transaction = self.transaction
        ready = transaction.ready_to_commit(command.version, command.session)
        if ready is None:
            live = transaction.versions.live_as(command.version)
            self.reports.report(command.id, "unchanged", parts=live)
            return
        push, staged = ready
        self._check_drains(push.manifest.in_flight, push.manifest.roles, push.manifest.adapter)
        if command.name:
            staged = transaction.name_staged(staged, command.name)
        push.state = replace(staged, due=True)
        push.asked.append(command.id)

    def _ask_rollback(self, command: RollbackWeights) -> None:
        self._check_no_rollback()
        self.transaction.check_none("roll back")
        parts = self.transaction.versions.to_roll_back(command.to, command.role)
        if parts.by_role:
            self._check_drains(command.in_flight, parts.by_role)
            self._rollback = _Rollback(command.id, command.in_flight, parts)
        else:
            live = self.transaction.versions.live_as(command.to, command.role)
            self.reports.report(command.id, "unchanged", parts=live)

    def _abort(self, command: AbortWeights) -> None:
        anything = not (command.version or command.session)
        if anything and self._rollback is not None and self.transaction.push is None:
            waiting, self._rollback = self._rollback, None
            self._release()
            why = "the rollback was aborted before its moment came; nothing has changed"
            self.reports.refuse(waiting.id, Conflict(why))
            self.reports.report(command.id, "aborted")
            return
        push = self.transaction.abort(command.version, command.session)
        self.reports.report(command.id, "aborted", version=push.version)

    def _name(self, command: NameWeights) -> None:
        self._check_no_rollback()
        versions, label = self.transaction.versions, command.version
        if label_of(versions.live.target.version) != label:
            self.transaction.check_none("name what is live")
        changed = versions.rename(label, command.of)
        version = versions.live.target.version
        if not changed:
            self.reports.report(command.id, "unchanged", version=version, role="target")
            return
        self._ended += self._settle()
        self._ended += self._scheduler.change_version(version, "continue")
        self.reports.report(command.id, "named", version=version, role="target")

    def _check_no_rollback(self) -> None:
        if self._rollback is not None:
            raise Conflict(
                "a rollback waits for running sequences (in a pause, for POST /engine/resume "
                "first); send this again after it is answered, or abort it (POST /weights/abort)"
            )

    def _check_drains(
        self, in_flight: InFlight, roles: Collection[str] = (), adapter: str = ""
    ) -> None:
        """Raise `Conflict` if the change would wait for sequences that an operator has paused."""
        started = self._scheduler.started(adapter) if adapter or "target" in roles else 0
        if in_flight == "drain" and self._gate.by_operator and started:
            raise Conflict(
                f"in_flight is drain, and {started} started requests cannot continue while "
                "generation is paused or asleep; resume it first (POST /engine/resume, "
                "/engine/wake), or say another in_flight (continue, recompute, abort)"
            )

    # -- between two steps -------------------------------------------------------------------------

    def advance(self) -> list[StepOutput]:
        """Make the change that is ready. Return the resulting outputs."""
        self._gate.release(Reason.SETTLING)
        self.transaction.cleanup.run()  # the last call's garbage, which no frame holds any more
        self.unloads.advance()
        asked = self._rollback
        if asked is not None and self._may_change(asked.in_flight, asked.parts):
            self._roll_back(*asked)
        waiting = self.transaction.push
        if waiting is not None and isinstance(waiting.state, Waiting):
            self._start(waiting)
        if (push := self.transaction.poll()) is not None:
            self._advance(push)
        if not self._changing:
            self._reads.advance()
        ended, self._ended = self._ended, []
        return ended

    def _advance(self, push: Push) -> None:
        match push.state:
            case FailedPush(error):
                self._close(push, error.code, error=error)
            case Unchanged(changed):
                self._close(push, "unchanged", parts=changed)
            case Gathering():
                self.reports.answer(push, "gathering")
            case Staged() as staged if push.to_commit:
                if self._may_change(push.manifest.in_flight, staged.changed):
                    self._commit(push, staged)
            case Staged(changed) if push.asked:
                self.reports.answer(push, "staged", parts=changed)

    def _start(self, push: Push) -> None:
        """Stage a push in place, once no sequence or reader could see half-written weights."""
        changed = self.transaction.versions.live.only(push.manifest.roles)
        if self._reads.busy or self._drains(push.manifest.in_flight, changed):
            return
        self._ended += self._settle()
        self._gate.hold(Reason.WRITING)
        self.transaction.start()

    def _drains(self, in_flight: InFlight, changed: Changed) -> bool:
        """Return True, and start no sequence, if running ones must end before the change."""
        adapter = changed.adapter.name if changed.adapter else ""
        concerns = in_flight == "drain" and (changed.target is not None or adapter)
        if not concerns or not self._scheduler.started(adapter):
            return False
        self._gate.hold(Reason.DRAINING, adapter=adapter)
        return True

    def _may_change(self, in_flight: InFlight, changed: Changed) -> bool:
        """Return True if no reader, draining sequence or in-flight step prevents the change.
        In-flight outputs are delivered before the pause of a commit, not after it.
        """
        if self._reads.busy or self._drains(in_flight, changed):
            return False
        ended = self._settle()
        self._ended += ended
        if ended:
            self._gate.hold(Reason.SETTLING)
        else:
            self._confirm()  # a rank that is gone ends this epoch before the change is recorded
        return not ended

    def _commit(self, push: Push, staged: Staged) -> None:
        started_s, changed = time.perf_counter(), staged.changed
        push.phases["wait"] = started_s - staged.since_s
        try:
            live = self.transaction.commit(push, staged)
        except TltError as error:  # it could not be recorded; in place, all of it has changed
            self._close(push, error.code, error=error)
            return
        self._take_over(live, changed, push.manifest.in_flight)
        pause_s = push.phases["commit"] = time.perf_counter() - started_s
        self._release()
        self.reports.answer(push, "committed", parts=changed, pause_ms=pause_s * 1e3)

    def _roll_back(self, id: str, in_flight: InFlight, parts: Changed) -> None:
        started_s = time.perf_counter()
        self._rollback = None
        try:
            live = self.transaction.versions.roll_back(parts)
        except TltError as error:
            self.reports.refuse(id, error)
        else:
            self._take_over(live, parts, in_flight)
            pause_s = time.perf_counter() - started_s
            self.reports.report(
                id, "rolled_back", parts=parts, phases={"commit": pause_s}, pause_ms=pause_s * 1e3
            )
        self._release()

    def _take_over(self, live: Live, changed: Changed, in_flight: InFlight) -> None:
        self._ended += self._settle()
        self._install(live, changed)
        if changed.target is not None:
            self._ended += self._scheduler.change_version(changed.target.version, in_flight)
        if changed.adapter is not None:
            loaded = live.adapters[changed.adapter.name].loaded
            self._ended += self._scheduler.change_adapter(loaded, in_flight)

    def _close(
        self,
        push: Push,
        result: str,
        *,
        parts: Changed | None = None,
        error: TltError | None = None,
    ) -> None:
        """End a push that was not committed. If it left quarantined weights, end all sequences."""
        self.transaction.close()
        if error is not None:
            error = self._joins.to_send_again(push, error)
            result = error.code
        self._release()
        if self.refusal is not None:
            self._ended += self._scheduler.fail(self.refusal)
        self.reports.answer(push, result, parts=parts, error=error)

    def _release(self) -> None:
        """Let steps run again after a change, unless live weights are quarantined."""
        self._gate.release(Reason.DRAINING, Reason.WRITING, Reason.IN_DOUBT)
        if self.transaction.versions.quarantined:
            self._gate.hold(Reason.IN_DOUBT)
