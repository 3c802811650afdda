"""Commands to all replicas of a fleet, each answered by one merged report.

A push stays staged until every replica has staged the same; then `fleet.json` is replaced, which is
the commit, and all are told to make it live. A replica that fails after that is handed to `lost`
and has to catch up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

from msgspec.structs import replace

from tlt_client.channels import PEER
from tlt_server.errors import (
    ChannelBroken,
    Conflict,
    EngineFailed,
    InvalidRequest,
    NotFound,
    PushFailed,
    TltError,
)
from tlt_server.frontend.link.catching_up import caught_up
from tlt_server.frontend.link.fleet_file import Committed, FleetFile, FleetRecord
from tlt_server.frontend.link.members import Member
from tlt_server.frontend.link.merging import digests, name_of
from tlt_server.frontend.link.orders import (
    Ask,
    Given,
    answer,
    as_one,
    ask_all,
    ask_each,
    done,
    refused,
)
from tlt_server.settings.addresses import is_loopback
from tlt_server.wire.commands import (
    AbortWeights,
    CommitWeights,
    ControlCommand,
    HandOver,
    InFlight,
    JoinGroup,
    LeaveGroup,
    LookAtWeights,
    Manifest,
    NameWeights,
    Pause,
    PushWeights,
    ReadWeights,
    Resume,
    RollbackWeights,
    SetPolicy,
    Sleep,
    UnloadAdapter,
    WakeUp,
    WeightCommand,
)
from tlt_server.wire.events import ControlReport, WeightReport
from tlt_server.wire.labels import label_of

WAITING = ("staged", "gathering")
STAGING = EngineFailed("it still stages")  # in place of a report that has not come


class FanOut:
    def __init__(
        self,
        replicas: Callable[[], Sequence[Member]],
        file: FleetFile,
        lost: Callable[[Any, str], None],
        *,
        url: str,
        key: str = "",
        halted: Callable[[], bool] = lambda: False,
        commit_s: float = 10.0,
    ) -> None:
        """`replicas`: those that take commands, in a constant order. `lost`: is told of one that
        has to catch up before it is used again, and why. `url`: the gateway's, where replicas take
        uploads; `key`: for it and for the other replicas. `halted`: whether generation is paused
        or asleep. `commit_s`: bound on answers to a commit.
        """
        self._replicas, self._file, self._lost = replicas, file, lost
        self._url, self._key = url, key
        self._halted, self._commit_s = halted, commit_s
        self.committing = asyncio.Lock()  # held while replicas may have different versions
        self._manifest = Manifest()  # the last that was staged
        self._staged: Mapping[Member, WeightReport] = {}  # who has staged it
        self._groups: dict[str, Sequence[Member]] = {}  # who has joined

    async def catch_up(self, replica: Member) -> None:
        """Bring a replica to the committed weights, just before it is used; a new fleet takes those
        of its first replica. Raise an error if it cannot have them now.
        """
        looked = await replica.told(LookAtWeights("", checksums=True))
        self._file.begin(looked.state, digests(looked))  # at once, before another replica is asked
        sources = [each.url for each in self._replicas() if each is not replica]
        fetch = Manifest(channel=PEER, path=" ".join(sources), key=self._key)
        await caught_up(replica, lambda: self._file.record, fetch)

    async def weights(self, command: WeightCommand) -> WeightReport:
        """Return the merged answer. Raise an error if no replica answers, or none can be asked."""
        if isinstance(command, AbortWeights) and self.committing.locked():
            raise Conflict("the push is being committed at all replicas, so it cannot be aborted")
        if command != LookAtWeights(command.id) and not isinstance(command, JoinGroup | LeaveGroup):
            async with self.committing:
                pass
        replicas = self._replicas()
        match command:
            case PushWeights():
                return await self._push(command)
            case CommitWeights() | NameWeights() | RollbackWeights():
                async with self.committing:
                    return await self._decide(command)
            case UnloadAdapter():
                return await self._unload(command)
            case JoinGroup():
                return await self._join(command)
            case LeaveGroup():
                self._groups.pop(command.name, None)
            case HandOver():
                raise Conflict("a gateway trains no drafter; its replicas do")
            case ReadWeights():
                replicas = replicas[:1]
        report: WeightReport = as_one(command, await ask_all(replicas, command))
        if report.result == "aborted":
            self._staged = {}
        return report

    async def _push(self, command: PushWeights) -> WeightReport:
        """Stage at all replicas, or at all that joined the group, and commit once all have."""
        manifest, replicas = command.manifest, self._replicas()
        if manifest.channel == "ipc":
            raise InvalidRequest(
                "channel is ipc, which reaches one engine of its host, and this is a fleet; push "
                "by disk, http or broadcast"
            )
        self._check_drain(manifest.in_flight)
        sent = replace(manifest, commit=False)
        if manifest.channel == "http":
            self._check_reached(replicas)
            sent = replace(sent, channel=PEER, path=self._url, key=self._key)
        members = self._groups.get(manifest.group, replicas)
        gone = [member.name for member in members if member not in replicas]
        answers = {} if gone else await self._stage(members, sent)
        if sent.group and not any(map(refused, answers.values())):
            gone += [member.name for member, each in answers.items() if isinstance(each, TltError)]
        report = None if gone else as_one(command, answers)
        if report is None or report.error is not None:
            await self._drop(sent, answers)
        if report is None:
            await ask_all(
                [member for member in members if member in replicas],
                LeaveGroup("", manifest.group, out_of_step=True),
                self._commit_s,
            )
            raise ChannelBroken(
                f"replica {gone[0]}, a member of group {manifest.group!r}, is gone, so all leave "
                "the group; join it again, and push again"
            )
        if report.error is None:
            waits = report.result == "staged"
            self._manifest, self._staged = sent, done(answers) if waits else {}
            if waits and manifest.commit:
                async with self.committing:
                    commit = CommitWeights(command.id, report.version, "", manifest.session)
                    report = await self._decide(commit)
                if report.error is not None:  # all replicas refuse it
                    await self._drop(sent, self._staged)
        return report

    def _check_reached(self, replicas: Sequence[Member]) -> None:
        """Refuse parts that stay where replicas on other hosts cannot take them, and do not let
        these send the fleet's key to a port of their own host.
        """
        urls = [self._url, *(each.url for each in replicas)]
        mine, *hosts = [urlsplit(url).hostname or "" for url in urls]
        far = [host for host in hosts if not is_loopback(host)]
        if is_loopback(mine) and far:
            raise InvalidRequest(
                f"channel is http, and the replica on {far[0]} cannot take the parts from "
                f"{self._url}, where this gateway listens; start it with --host and an address "
                "that its replicas reach, or push by disk"
            )

    async def _stage(self, members: Sequence[Member], sent: Manifest) -> Given:
        """Return the answers in their order. After a refusal the other replicas have `commit_s` to
        answer, since what they still stage is in vain.
        """
        push = PushWeights("", sent)
        tasks = {each: asyncio.create_task(answer(each, push)) for each in members}
        for ended in asyncio.as_completed(tasks.values()):
            if refused(await ended):
                await asyncio.wait(tasks.values(), timeout=self._commit_s)
                break
        return {each: task.result() if task.done() else STAGING for each, task in tasks.items()}

    async def _drop(self, sent: Manifest, answers: Given) -> None:
        """Abort a push where it was accepted. A replica that refused it may have another, and so
        may one that has not answered.
        """
        accepted = [
            replica
            for replica, each in answers.items()
            if each is STAGING or (isinstance(each, WeightReport) and each.result in WAITING)
        ]
        if accepted:
            self._staged = {}
            version = "" if sent.session else sent.version
            await ask_all(accepted, AbortWeights("", version, sent.session), self._commit_s)

    # -- changes of what is live, by a caller who holds `committing` -------------------------------

    async def _decide(self, command: CommitWeights | NameWeights | RollbackWeights) -> WeightReport:
        record, asked = self._file.record, partial(answer, command=command)
        match command:
            case CommitWeights():
                versions = {"", *(each.version for each in self._staged.values())}
                mine = command.session in ("", self._manifest.session)
                if self._staged and mine and command.version in versions:
                    return await self._commit(command)
                after = record  # it is live already, or there is none
            case NameWeights():
                after = record.naming(command.version)
            case RollbackWeights():
                return await self._roll_back(command)
        return await self._change(command, after, self._replicas(), asked)

    async def _commit(self, command: CommitWeights) -> WeightReport:
        """Commit what all have staged."""
        manifest, staged = self._manifest, self._staged
        name = command.name or name_of(each.version for each in staged.values())
        first = next(iter(staged.values()))
        staged_as = first.version if name != first.version else ""
        kept = {role: Committed(name, each, staged_as) for role, each in digests(first).items()}

        async def commit(replica: Member) -> Any:
            report = staged[replica]
            if report.result == "unchanged":
                return report
            new = name if name != report.version else ""
            order = CommitWeights("", report.version, new, command.session)
            return await answer(replica, order)

        after = self._file.record.committing(kept, manifest.adapter)
        try:
            return await self._change(command, after, staged, commit, manifest.in_flight)
        except PushFailed:
            await self._drop(manifest, staged)
            raise

    async def _roll_back(self, command: RollbackWeights) -> WeightReport:
        record, orders = self._file.record, [command]
        wanted = record.to_roll_back(command.to, command.role)
        if not command.to:  # a replica that has caught up has had other pushes
            orders = [
                replace(command, to=kept.version, role=role)
                for role, kept in sorted(wanted.items())
            ]

        async def roll_back(replica: Member) -> Any:
            for order in orders:
                ended = await answer(replica, order)
                if isinstance(ended, TltError) or refused(ended):
                    break
            return ended

        after = record.rolling_back(wanted)
        return await self._change(command, after, self._replicas(), roll_back, command.in_flight)

    async def _change(
        self,
        command: WeightCommand,
        after: FleetRecord,
        replicas: Iterable[Member],
        ask: Ask,
        in_flight: InFlight = "continue",
    ) -> WeightReport:
        """Make `after` the record, and have these replicas follow it; if all refuse, take it back.
        Those that do not follow in time are lost. A drain takes as long as its requests do.
        """
        self._check_drain(in_flight)
        before, within_s = self._file.record, None if in_flight == "drain" else self._commit_s
        await self._write(after)
        answers = await ask_each(replicas, ask, within_s)
        if all(map(refused, answers.values())):
            await self._write(before)
            return cast(WeightReport, as_one(command, answers))
        self._staged = {}
        reports = [*done(answers).values()]
        name = name_of(["", *(each.version for each in reports)])
        if name != label_of(name):  # some replica has other content of this label
            role = reports[0].role
            after = after.naming(name, ("target", "drafter") if role == "all" else (role,))
            await self._write(after)
        lagging = {
            replica: why
            for replica in {**answers, **dict.fromkeys(self._replicas())}
            if (why := _lacks(answers.get(replica), after))
        }
        for replica, why in lagging.items():
            self._lost(replica, why)
        followed = {each: answers[each] for each in answers if each not in lagging}
        gone = {each: why for each, why in answers.items() if isinstance(why, TltError)}
        report: WeightReport = as_one(command, followed or done(answers) or gone)
        return replace(report, lagging={each.name: why for each, why in lagging.items()})

    async def _write(self, record: FleetRecord) -> None:
        if record == self._file.record:
            return
        try:
            await asyncio.to_thread(self._file.commit, record)
        except OSError as error:
            raise PushFailed(
                f"the change cannot be recorded in the state directory ({error}), so nothing has "
                "changed; make room there and send it again"
            ) from None

    def _check_drain(self, in_flight: InFlight) -> None:
        if in_flight == "drain" and self._halted():
            raise Conflict(
                "in_flight is drain, and started requests cannot continue while generation is "
                "paused or asleep; resume it first (POST /engine/resume, /engine/wake), or say "
                "another in_flight (continue, recompute, abort)"
            )

    # -- adapters, groups and control --------------------------------------------------------------

    async def _unload(self, command: UnloadAdapter) -> WeightReport:
        """Unload an adapter. Other commands go on meanwhile, since its requests may take long."""
        kept = self._file.record.adapters.get(command.name)
        if kept is not None:
            async with self.committing:
                await self._write(self._file.record.without(command.name))
        report: WeightReport = as_one(command, await ask_all(self._replicas(), command))
        if kept is not None and report.result not in ("unloaded", NotFound.code):
            async with self.committing:
                record = self._file.record.committing({"adapter": kept}, command.name)
                await self._write(record)
        return report

    async def _join(self, command: JoinGroup) -> WeightReport:
        """Have the replicas join with ranks that follow each other, all or none."""
        replicas, rank, world_size = self._replicas(), command.rank, command.world_size
        if rank + len(replicas) > world_size:
            raise InvalidRequest(
                f"rank_offset is {rank} and world_size {world_size}, and {len(replicas)} replicas "
                f"take the ranks from {rank} on; give a world_size of {rank + len(replicas)} or "
                "more (GET /get_world_size counts them)"
            )
        ranks = {replica: rank + i for i, replica in enumerate(replicas)}
        self._groups.pop(command.name, None)
        answers = await ask_each(
            replicas, lambda one: answer(one, replace(command, rank=ranks[one]))
        )
        joined, report = done(answers), as_one(command, answers)
        if len(joined) == len(replicas):
            self._groups[command.name] = replicas
            return report
        await ask_all(joined, LeaveGroup("", command.name), self._commit_s)
        if report.error is None:
            name, why = next(iter(report.lagging.items()))
            raise ChannelBroken(f"replica {name}: {why}; join group {command.name!r} again")
        return report

    async def control(self, command: ControlCommand | SetPolicy) -> ControlReport:
        """Return the merged answer, as `weights` does. A pause or sleep that one replica refuses is
        undone at the others.
        """
        answers = await ask_all(self._replicas(), command)
        report: ControlReport = as_one(command, answers)
        if report.error is not None and isinstance(command, Pause | Sleep):
            undo = WakeUp("", command.memory) if isinstance(command, Sleep) else Resume("")
            await ask_all(done(answers), undo, self._commit_s)
        return report


def _lacks(answer: Any, record: FleetRecord) -> str:
    """Return why a replica does not have the committed weights; empty if it has."""
    if answer is None:
        return "it has joined meanwhile"
    if isinstance(answer, TltError):
        return answer.message
    if answer.error is not None:
        return str(answer.error[1])
    for role, kept in record.roles.items():
        if answer.role in (role, "all"):
            if answer.version != kept.version:
                return f"its {role} is {answer.version!r}, not {kept.version!r}"
            if digests(answer).get(role, kept.digest) != kept.digest != "":
                return f"its {role} {kept.version!r} has other content"
    return ""
