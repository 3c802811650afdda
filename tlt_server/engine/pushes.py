"""Weight commands for the loop: asks the transaction, waits for the right moment, tells scheduler,
runner and drafter.

`advance` runs between two steps; there a commit is one swap of complete weights. Where weights are
staged in place no step runs from the first write until the push has ended, and after a failure none
until the next commit. Every command ends in exactly one `WeightReport`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from tlt_client.channels import DRAFTER_PREFIX
from tlt_client.channels.errors import ChannelError
from tlt_client.channels.groups import Membership
from tlt_server.engine.gate import Gate, Reason
from tlt_server.engine.scheduler import Scheduler
from tlt_server.errors import (
    ChannelBroken,
    Conflict,
    Forbidden,
    InvalidRequest,
    NotFound,
    PushFailed,
    TltError,
    Unavailable,
    from_code,
)
from tlt_server.records import (
    AbortWeights,
    CommitWeights,
    InFlight,
    JoinGroup,
    LeaveGroup,
    LookAtWeights,
    NameWeights,
    PushWeights,
    ReadWeights,
    RollbackWeights,
    StepOutput,
    WeightCommand,
    WeightReport,
    WeightState,
)
from tlt_server.threads import Crew
from tlt_server.weights.parts import Changed, Live
from tlt_server.weights.push import Push
from tlt_server.weights.transaction import Transaction

MAX_JOINS = 4  # at once; a trainer whose ranks join one by one needs one at a time
MAX_READERS = 4  # at once, those included which wait for a change to end
MAX_NUMBERS = 2**21  # that one command reads of a tensor


class _Rollback(NamedTuple):
    """A rollback that waits: for what runs to end, or for whoever reads the live storage."""

    id: str
    in_flight: InFlight
    parts: Changed  # that it makes live


class WeightPushes:
    """`install(live, changed)` makes runner and drafters use `live`, of which the roles of
    `changed` are other than before.
    """

    def __init__(
        self,
        gate: Gate,
        transaction: Transaction,
        scheduler: Scheduler,
        install: Callable[[Live, Changed], None],
        settle: Callable[[], list[StepOutput]],
    ) -> None:
        """`settle` commits the steps in flight."""
        self._gate, self.transaction, self._scheduler = gate, transaction, scheduler
        self._install, self._settle = install, settle
        self._reports: deque[WeightReport] = deque()  # appended to by threads, too
        self._readers = Crew(
            "read weights", MAX_READERS
        )  # of the live storage, which must not change meanwhile
        self._unread: list[
            str
        ] = []  # ids of commands for a reader of sums that came while a change waited for others
        self._joiners = Crew("join group", MAX_JOINS)
        self._rollback: _Rollback | None = None
        self._ended: list[StepOutput] = []

    @property
    def due(self) -> bool:
        """Whether the next step has something to do for a change, without a command."""
        return self._gate.held_for(Reason.SETTLING) or self.transaction.untidy

    @property
    def busy(self) -> bool:
        """Something is on its way that no command will announce."""
        return self.in_use or self._joiners.busy

    @property
    def in_use(self) -> bool:
        """The weights are read, or a push or a rollback is under way."""
        push = self.transaction.push
        return (
            self._changing
            or self._readers.busy
            or (push is not None and (push.state == "staging" or push.manifest.commit))
        )

    @property
    def refusal(self) -> Unavailable | None:
        """Why nothing is generated, while what is live of some role is no version."""
        reasons = "; ".join(self.transaction.quarantined.values())
        return (
            Unavailable(f"nothing is generated: {reasons}; push that version, or another")
            if reasons
            else None
        )

    def take_reports(self) -> list[WeightReport]:
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def apply(self, command: WeightCommand) -> None:
        try:
            self._apply(command)
        except TltError as error:
            of = command.manifest if isinstance(command, PushWeights) else None
            if of is not None:
                self.transaction.refuse(of)
                if of.group:
                    error = type(error)(
                        f"{error.message}; nobody takes what group {of.group!r} brings of it, so it is left: make it anew"
                    )
            self._report(
                command.id,
                error.code,
                error=error,
                version=of.version if of else "",
                role=of.role if of else "",
            )

    def advance(self) -> list[StepOutput]:
        """Between two steps: commit what is staged, if its moment has come. Returns the sequences
        that end of it.
        """
        self._gate.release(Reason.SETTLING)
        self.transaction.tidy()  # what the call before has dropped, of which nothing is on the stack any more
        if self._rollback is not None and self._may_change(
            self._rollback.in_flight, self._rollback.parts
        ):
            self._roll_back(*self._rollback)
        waiting = self.transaction.push
        if waiting is not None and waiting.state == "waiting":
            self._begin(waiting)
        push = self.transaction.poll()
        if push is not None:
            self._advance(push)
        if self._unread and not self._changing:
            for id in self._unread:
                try:
                    self._sum(id)
                except Unavailable as error:
                    self._report(id, error.code, error=error)
            self._unread.clear()
        ended, self._ended = self._ended, []
        return ended

    @property
    def _changing(self) -> bool:
        """Whether the live storage is changing, or about to."""
        push = self.transaction.push
        if self._rollback is not None or push is None:
            return self._rollback is not None
        return self.transaction.in_place or (
            push.state == "staged" and (push.manifest.commit or push.due)
        )

    def _apply(self, command: WeightCommand) -> None:
        transaction = self.transaction
        if (
            self._gate.held_for(Reason.WEIGHTS_ASLEEP)
            and not isinstance(command, AbortWeights | JoinGroup | LeaveGroup)
            and command != LookAtWeights(command.id)
        ):
            raise Conflict(
                "the weights sleep; wake them first (POST /wake_up?tags=weights, or /resume_memory_occupation)"
            )
        match command:
            case PushWeights(id, manifest):
                self._check_no_rollback()
                push = transaction.begin(manifest)
                if push.state == "waiting" and not (push.asked or push.trails) and manifest.commit:
                    self._check_begun(push)
                push.asked.append(id)
                if push.state == "waiting" and not transaction.in_place:
                    transaction.start()
            case CommitWeights(id, version, name, session):
                ready = transaction.ready_to_commit(version, session)
                if ready is None:
                    self._report(id, "unchanged", parts=transaction.live_as(version))
                    return
                self._check_drains(ready.manifest.in_flight, ready.manifest.roles)
                if name:
                    transaction.name_staged(name)
                ready.asked.append(id)
                ready.due = True
            case AbortWeights(id, "", "") if (
                self._rollback is not None and transaction.push is None
            ):
                waiting, self._rollback = self._rollback, None
                self._reset()
                self._report(
                    waiting.id,
                    "conflict",
                    error=Conflict(
                        "the rollback was aborted before its moment came; nothing has changed"
                    ),
                )
                self._report(id, "aborted")
            case AbortWeights(id, version, session):
                push = transaction.abort(version, session)
                self._report(id, "aborted", version=push.version)
            case NameWeights(id, version, of):
                self._check_no_rollback()
                if self._name(version, of):
                    self._report(id, "named", version=version, role="target")
                else:
                    self._report(id, "unchanged", version=version, role="target")
            case ReadWeights(id, name, rows):
                tensor = self._readable(name, rows)
                self._readers.check_room(len(self._unread))
                self._read(
                    id,
                    lambda: {
                        "values": tensor.float().cpu().contiguous().numpy().tobytes(),
                        "shape": list(tensor.shape),
                    },
                )
            case RollbackWeights(id, to, in_flight):
                self._check_no_rollback()
                parts = transaction.to_roll_back(to)
                if not parts.by_role:
                    self._report(id, "unchanged", version=to)
                else:
                    self._check_drains(in_flight, parts.by_role)
                    self._rollback = _Rollback(id, in_flight, parts)
            case LookAtWeights(id, checksums):
                if not checksums:
                    self._report(id, "looked")
                    return
                self._readers.check_room(len(self._unread))
                if self._changing:
                    self._unread.append(id)
                else:
                    self._sum(id)
            case JoinGroup(id, name):
                self._check_group_free(name)
                if "broadcast" not in transaction.channels:
                    raise Forbidden(
                        "this server takes no weights by broadcast; start it with broadcast among its --weight-channels"
                    )
                self._joiners.check_room()
                transaction.leave(name)
                self._joiners.start(partial(self._join, command))
            case LeaveGroup(id, name, out_of_step):
                if not out_of_step:
                    self._check_group_free(name)
                transaction.skip(name)
                self._report(id, "left")

    def _join(self, asked: JoinGroup) -> None:
        """In a thread: it takes until all ranks are there, or the group's time is up."""
        groups = self.transaction.intake.groups
        try:
            groups.join(
                Membership(
                    asked.name,
                    asked.backend,
                    asked.master_address,
                    asked.master_port,
                    asked.rank,
                    asked.world_size,
                    asked.prefixed,
                    groups.timeout_s,
                    asked.unique_id,
                )
            )
            self._report(asked.id, "joined")
        except ChannelError as error:
            self._report(asked.id, error.code, error=from_code(error.code, str(error)))
        except Exception as cause:  # who asks must be answered, whatever it is
            failed = ChannelBroken(
                f"the group cannot be joined ({type(cause).__name__}: {cause}); make it anew"
            )
            self._report(asked.id, failed.code, error=failed)

    def _check_group_free(self, name: str) -> None:
        if self.transaction.brings(name):
            raise Conflict(f"group {name!r} brings a version just now; wait for that push to end")

    def _to_send_again(self, push: Push, error: TltError) -> TltError:
        """What came through a group is gone, so to ask again, as clients do after some errors,
        would be to wait for nothing.
        """
        group = push.manifest.group
        if group and error.retryable:
            return ChannelBroken(
                f"{error.message}. What came through group {group!r} is gone: make the group anew, and send again what is "
                "asked for again"
            )
        if (
            group
            and group not in self.transaction.intake.groups
            and not isinstance(error, ChannelBroken)
        ):
            return type(error)(
                f"{error.message}; group {group!r} is left, as more of this may come through it: make it anew"
            )
        return error

    def _begin(self, push: Push) -> None:
        """In place: once nothing that runs, and nobody who reads, could see half of the new
        weights.
        """
        if self._readers.busy or self._drains(
            push.manifest.in_flight, self.transaction.live.only(push.manifest.roles)
        ):
            return
        self._ended += self._settle()
        self._gate.hold(Reason.WRITING)
        self.transaction.start()

    def _drains(self, in_flight: InFlight, changed: Changed) -> bool:
        """Whether what runs must end before these parts change; then nothing new begins."""
        if in_flight != "drain" or changed.target is None or not self._scheduler.started:
            return False
        self._gate.hold(Reason.DRAINING)
        return True

    def _may_change(self, in_flight: InFlight, changed: Changed) -> bool:
        """Nobody reads, nothing must end first, and nothing is in flight: what was is told before
        the pause, not behind it.
        """
        if self._readers.busy or self._drains(in_flight, changed):
            return False
        ended = self._settle()
        self._ended += ended
        if ended:
            self._gate.hold(Reason.SETTLING)
        return not ended

    def _name(self, version: str, of: str) -> bool:
        if not self.transaction.name_live(version, of):
            return False
        self._ended += self._settle()
        self._ended += self._scheduler.change_version(version, "continue")
        return True

    def _readable(self, name: str, rows: int) -> torch.Tensor:
        """The first rows of a live tensor, which nothing is about to change."""
        transaction, role = (
            self.transaction,
            "drafter" if name.startswith(DRAFTER_PREFIX) else "target",
        )
        part = transaction.live.by_role.get(role)
        tensor = (
            part.network.parameters().get(name.removeprefix(DRAFTER_PREFIX))
            if part is not None
            else None
        )
        if tensor is None:
            raise NotFound(
                f"there is no tensor {name[:200]!r}; POST /weight_checker lists the names"
            )
        if self._changing:
            raise Conflict(
                "the weights in use are about to change, or change just now; read them once the push or rollback is answered"
            )
        if role in transaction.quarantined:
            raise Conflict(
                f"{name[:200]!r} cannot be read: {transaction.quarantined[role]}; push that version, or another"
            )
        if tensor[:rows].numel() > MAX_NUMBERS:
            raise InvalidRequest(
                f"{rows} rows of {name[:200]!r}, of shape {list(tensor.shape)}, are {tensor[:rows].numel()} numbers; the "
                f"limit is {MAX_NUMBERS}: ask for at most {MAX_NUMBERS // tensor[0].numel()} (truncate_size)"
            )
        return tensor[:rows]

    def _sum(self, id: str) -> None:
        live = self.transaction.live
        self._read(id, lambda: {"parts": live.only(live.by_role), "checksums": live.live_sums()})

    def _read(self, id: str, look: Callable[[], dict[str, Any]]) -> None:
        """What `look` sees of the live storage, in a thread, as it takes a while."""

        def read() -> None:
            try:
                self._report(id, "looked", **look())
            except Exception as cause:  # who asks must be answered, whatever it is
                error = PushFailed(
                    f"the weights in use cannot be read ({type(cause).__name__}: {cause}); nothing has changed: ask again"
                )
                self._report(id, error.code, error=error)

        self._readers.start(read)

    def _check_drains(self, in_flight: InFlight, roles: Collection[str]) -> None:
        """`Conflict` where the change would wait for the end of what does not go on."""
        started = self._scheduler.started
        if in_flight == "drain" and "target" in roles and self._gate.by_operator and started:
            raise Conflict(
                f"in_flight is drain, and {started} requests that have started do not go on while generation is paused or asleep; "
                "resume it first (POST /resume, /wake_up), or say another in_flight (continue, recompute, abort)"
            )

    def _check_begun(self, push: Push) -> None:
        """It is refused now rather than once all of it is there."""
        try:
            self._check_drains(push.manifest.in_flight, push.manifest.roles)
        except Conflict:
            self.transaction.close()
            self._reset()
            raise

    def _check_no_rollback(self) -> None:
        if self._rollback is not None:
            raise Conflict(
                "a rollback waits for what runs to end (in a pause, for POST /resume first); send this again after it is "
                "answered, or abort it (POST /weights/abort)"
            )

    def _advance(self, push: Push) -> None:
        if push.state == "failed":
            assert push.error is not None
            self._close(push, push.error.code, error=push.error)
        elif push.state == "unchanged":
            self._close(push, "unchanged", parts=push.parts)
        elif push.state == "gathering":
            self._answer(push, "gathering")
        elif push.manifest.commit or push.due:
            assert push.parts is not None
            if self._may_change(push.manifest.in_flight, push.parts):
                self._commit(push)
        elif push.asked:
            self._answer(push, "staged", parts=push.parts)

    def _commit(self, push: Push) -> None:
        started, parts = time.perf_counter(), push.parts
        assert parts is not None
        push.phases["wait"] = started - push.staged_at
        try:
            self._take_over(self.transaction.commit(), parts, push.manifest.in_flight)
        except (
            TltError
        ) as error:  # the commit could not be recorded; nothing has changed, or in place all of it
            self._close(push, error.code, error=error)
            return
        pause_s = push.phases["commit"] = time.perf_counter() - started
        self._reset()
        self._answer(push, "committed", parts=parts, pause_ms=pause_s * 1e3)

    def _roll_back(self, id: str, in_flight: InFlight, parts: Changed) -> None:
        started = time.perf_counter()
        self._rollback = None
        try:
            self._take_over(self.transaction.rollback(parts), parts, in_flight)
        except TltError as error:
            self._report(id, error.code, error=error)
        else:
            pause_s = time.perf_counter() - started
            self._report(
                id, "rolled_back", parts=parts, phases={"commit": pause_s}, pause_ms=pause_s * 1e3
            )
        self._reset()

    def _take_over(self, live: Live, changed: Changed, in_flight: InFlight) -> None:
        self._ended += self._settle()
        self._install(live, changed)
        if changed.target is not None:
            self._ended += self._scheduler.change_version(changed.target.version, in_flight)

    def _close(
        self,
        push: Push,
        result: str,
        *,
        parts: Changed | None = None,
        error: TltError | None = None,
    ) -> None:
        """Nothing was committed; what a failure in place leaves behind is told with the answer."""
        self.transaction.close()
        if error is not None:
            error = self._to_send_again(push, error)
            result = error.code
        self._reset()
        if self.refusal is not None:
            self._ended += self._scheduler.fail(self.refusal)
        self._answer(push, result, parts=parts, error=error)

    def _reset(self) -> None:
        self._gate.release(Reason.DRAINING, Reason.WRITING, Reason.IN_DOUBT)
        if self.transaction.quarantined:
            self._gate.hold(Reason.IN_DOUBT)

    # -- reports -------------------------------------------------------------------------------------------------

    def _answer(
        self,
        push: Push,
        result: str,
        *,
        parts: Changed | None = None,
        error: TltError | None = None,
        pause_ms: float = 0.0,
    ) -> None:
        for id in push.asked or [""]:  # what nobody has asked for is told all the same
            self._report(
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

    def _report(
        self,
        id: str,
        result: str,
        *,
        parts: Changed | None = None,
        error: TltError | None = None,
        version: str = "",
        role: str = "",
        checksums: dict[str, str] | None = None,
        phases: dict[str, float] | None = None,
        pause_ms: float = 0.0,
        values: bytes = b"",
        shape: Sequence[int] = (),
    ) -> None:
        sums = dict(parts.sums) if parts and checksums is None else checksums or {}
        self._reports.append(
            WeightReport(
                id=id,
                state=self.state(),
                result=result,
                error=(error.code, error.message) if error else None,
                version=parts.version if parts else version,
                role=parts.role if parts else role,
                checksums=sums,
                phases=dict(phases or {}),
                pause_ms=pause_ms,
                values=values,
                shape=list(shape),
            )
        )

    def state(self) -> WeightState:
        transaction, push = self.transaction, self.transaction.push
        live = {role: part.version for role, part in transaction.live.by_role.items()}
        return WeightState(
            target=live["target"],
            drafter=live.get("drafter", ""),
            previous={role: part.version for role, part in transaction.previous.by_role.items()},
            open={"version": push.version, "role": push.manifest.role, "state": push.state}
            if push
            else {},
            spooled=transaction.spooled,
            quarantined=dict(transaction.quarantined),
            groups=sorted(transaction.intake.groups),
            sockets=str(transaction.intake.sockets or ""),
        )
