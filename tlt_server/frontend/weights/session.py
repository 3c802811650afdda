"""A session around a weight update, which trainers begin and end: everything pushed in between
becomes live at its end, or nothing does.

The engine has one transaction (`weights/transaction.py`), which knows a push by the session's id: a
push inside a session stays staged, and the end commits it under the last name that the trainer
gave. Outside a session, and without staging (`weight_staging` none), a push commits by itself. The
server has one session, which all dialects share, and every push of weights goes through it.
Invariant: an end commits or names only what was pushed in its own session, by calls that started in
it. A session whose trainer falls silent ends after a while and drops its staged weights, since
until then it blocks every other push.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Concatenate, Literal, ParamSpec, get_args

import msgspec
import structlog
from msgspec import Meta, Struct

from tlt_client.arguments import MAX_VERSION, VERSION
from tlt_server.errors import Conflict, NotFound, TltError, from_code
from tlt_server.frontend.link.client import EngineClient
from tlt_server.wire.commands import (
    AbortWeights,
    CommitWeights,
    LookAtWeights,
    Manifest,
    NameWeights,
    PushWeights,
    Role,
    WeightCommand,
)
from tlt_server.wire.events import WeightReport

Selector = Literal["target", "draft", "all"]
Version = Annotated[
    str,
    "a name without slash, control and format characters, and without '@' after '+', which every "
    "token will carry",
    Meta(min_length=1, max_length=MAX_VERSION, pattern=VERSION),
]
Directory = Annotated[str, Meta(max_length=4096)]  # the length of a path on Linux
AdapterDirectory = Annotated[
    Directory, "directory of the adapter, absolute or below the weight root", Meta(min_length=1)
]
WeightDirectory = Annotated[
    Directory, "directory of safetensors, absolute or below the weight root", Meta(min_length=1)
]
Call = Literal["push", "rename", "end"]
WAITING = ("staged", "gathering")  # results of pushes that are not live yet

P = ParamSpec("P")  # the fields of a command, except its id

log = structlog.get_logger()


class UpdateStatus(Struct, frozen=True):
    """A weight update in progress: every push stays staged until its end (POST /end_weight_update
    or /finish_weight_update). Starting another drops its staged weights.
    """

    selector: Annotated[str, "whose weights it brings"]
    pushes: Annotated[int, "calls that have pushed in it"]
    age_s: Annotated[float, "since it was started"]
    ends_in_s: Annotated[
        float, "until it is ended and dropped, unless a call comes (weight_update_ttl_s)"
    ]


class Update:
    """One weight update, from its start until its end or the next start. A pushing call keeps the
    update that it started in.
    """

    def __init__(
        self,
        session: WeightSession,
        selector: Selector | None = None,
        id: str = "",
        ended: WeightReport | None = None,
        name: str = "",
    ) -> None:
        """`selector`: None: the update stands for pushes outside any session."""
        self._session, self.selector, self.id = session, selector, id
        # the answer to its end, for a repeated end; outside any session that of the last session,
        # until a push
        self.ended = ended
        self.name = name  # name of the version that becomes live at the end, or is live
        self.ending = asyncio.Lock()
        self.calls = 0  # number of calls that have started to push
        self.succeeded = 0  # number of the last call that succeeded
        self.pushing = 0  # number of calls in progress
        self.owed: set[str] = set()  # roles whose last push failed, or is under way
        self.reports: dict[str, WeightReport] = {}  # role -> the last push of it that succeeded
        self.started_s = self.touched_s = 0.0  # by the loop's clock
        # outside any session, until a push: the last session ended by itself, which callers of
        # these kinds have not been told
        self.untold: set[Call] = set()

    @property
    def role(self) -> Role:
        """The role of a push that names none."""
        return "drafter" if self.selector == "draft" else "target"

    @property
    def busy(self) -> bool:
        return bool(self.pushing) or self.ending.locked()

    @property
    def holds(self) -> set[str]:
        """Roles whose pushed weights are staged or incomplete."""
        return {role for role, report in self.reports.items() if report.result in WAITING}

    async def push(self, manifest: Manifest) -> WeightReport:
        """Push weights. On return they are live, or staged (inside a session), or gathering (the
        manifest is partial and tensors are missing).
        """
        return succeeded(await self.tried(manifest))

    async def tried(self, manifest: Manifest) -> WeightReport:
        """Push as `push` does, but return the engine's refusal as a report."""
        session = self._session
        session.check_takes(self)
        if self.selector is not None:
            manifest = msgspec.structs.replace(
                manifest, session=self.id, commit=manifest.commit and not session.stages
            )
        self.owed.update(manifest.roles)
        report = await session.report(PushWeights, manifest)
        if report.error is None:
            self.owed.difference_update(manifest.roles)
            # The engine has one push at a time, so one that is done ends what waited.
            done = () if report.result in WAITING else self.holds
            self.reports |= dict.fromkeys((*manifest.roles, *done), report)
        return report


class WeightSession:
    def __init__(self, engine: EngineClient, *, stages: bool, ttl_s: float = 600.0) -> None:
        """`stages`: a version is kept apart from the active one until it is committed. `ttl_s`: how
        long a session may be idle.
        """
        self._engine, self.stages, self._ttl_s = engine, stages, ttl_s
        self._update = Update(self)
        self.arrivals = {"target": 0, "drafter": 0}  # pushes of each role that are or were live
        self._idle: asyncio.Task[None] | None = None  # ends the session that is open
        self._adoption: asyncio.Task[WeightReport] | None = None  # the last one

    async def adopt(self, manifest: Manifest) -> WeightReport:
        """Push a drafter of the server's own trainer, outside of any update. `Conflict` while an
        update is open or another push is in progress, as it must not delay them. It continues even
        if the caller leaves, and other pushes wait for its end.
        """
        adopting = self._engine.adopting
        if self._update.selector is not None or self._update.pushing or adopting.locked():
            raise Conflict("a weight update is open or a push is in progress; try again later")
        await adopting.acquire()
        self._adoption = asyncio.create_task(self._adopt(manifest))
        return await asyncio.shield(self._adoption)

    async def _adopt(self, manifest: Manifest) -> WeightReport:
        try:
            command = PushWeights(self._engine.command_id(), manifest)
            return succeeded(await self._engine.weights(command))
        finally:
            self._engine.adopting.release()

    async def begin(self, selector: Selector) -> None:
        """Start a session and drop what an earlier one left, staged or in progress; a repeated
        start changes nothing else. `Conflict` if that would drop a target's weights for the
        drafter's: a trainer that means to push both would learn from the wrong target for ever.
        """
        earlier = self._update
        of_target = earlier.selector in ("target", "all") and "target" in earlier.holds
        if selector == "draft" and of_target:
            raise Conflict(
                "a weight update that was started holds weights of the target, which this would "
                "drop; finish it first (POST /finish_weight_update, /end_weight_update), or start "
                "it again, for all or for the target, to drop them"
            )
        update = self._update = Update(self, selector, self._engine.command_id())
        update.started_s = update.touched_s = asyncio.get_running_loop().time()
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.create_task(self._end_when_idle(update))
        await self._drop(earlier)

    async def _drop(self, update: Update) -> None:
        """Abort the update's staged or running push."""
        if update.selector is not None and update.calls:
            with suppress(NotFound):  # there is nothing, or another call has ended it
                await self.ask(AbortWeights, session=update.id)

    async def _end_when_idle(self, update: Update) -> None:
        ttl_s, now_s = self._ttl_s, asyncio.get_running_loop().time
        while (left_s := update.touched_s + ttl_s - now_s()) > 0 or update.busy:  # noqa: ASYNC110
            await asyncio.sleep(left_s if left_s > 0 else ttl_s / 10)
        if update is not self._update:
            return
        self._update = Update(self)
        self._update.untold = {*get_args(Call)}
        log.warning(
            "weight_update_dropped",
            selector=update.selector,
            pushes=update.calls,
            idle_s=self._ttl_s,
            remedy="end a weight update that was started, or allow more time between its calls "
            "(weight_update_ttl_s)",
        )
        with suppress(TltError):  # an engine that is gone holds nothing
            await self._drop(update)

    @property
    def status(self) -> UpdateStatus | None:
        """Return the open session; None without one."""
        update, now_s = self._update, asyncio.get_running_loop().time()
        if update.selector is None:
            return None
        idle_s = 0.0 if update.busy else now_s - update.touched_s
        return UpdateStatus(
            update.selector,
            update.calls,
            round(now_s - update.started_s, 3),
            round(max(0.0, self._ttl_s - idle_s), 3),
        )

    @contextmanager
    def pushing(self) -> Iterator[Update]:
        """Enclose a pushing call, including the reading of its body. After a refused call, the
        session has nothing to make live until another call succeeds.
        """
        update = self._update
        update.ended = None
        update.calls += 1
        update.pushing += 1
        call = update.calls
        try:
            yield update
        finally:
            update.pushing -= 1
            update.touched_s = asyncio.get_running_loop().time()
        update.succeeded = max(update.succeeded, call)
        update.untold.clear()

    def _tell(self, call: Call) -> None:
        """Refuse the first call of a kind after a session that ended by itself, as it may be meant
        for that session; so it changes nothing else.
        """
        if call in self._update.untold:
            self._update.untold.remove(call)
            raise Conflict(
                f"the weight update ended by itself, since no call arrived for {self._ttl_s:g} s "
                "(weight_update_ttl_s), and its weights were dropped; start another, or send this "
                "again to do it outside of an update"
            )

    def check_takes(self, update: Update) -> None:
        """Raise `Conflict` unless `update` is still the open one and is not being ended."""
        if update is not self._update:
            raise Conflict(
                "a weight update has started or ended since this push was asked for, and the push "
                "may not belong to it; push again"
            )
        if update.ending.locked():
            raise Conflict("the weight update is being ended; wait for that, then push")
        self._tell("push")

    async def end(self, name: str = "") -> WeightReport:
        """Commit the pushed weights. A repeated end gets the answer of the first, unless it gives
        another name. `Conflict` without a session.

        If nothing can be committed, the session stays open: the trainer may push the missing parts
        or give another name.
        """
        self._tell("end")
        update = self._update
        async with update.ending:
            if update.ended is not None:
                if name not in ("", update.name, update.ended.version):
                    raise Conflict(
                        "the weight update has ended already and its version is "
                        f"{update.ended.version!r}, not {name!r}; start another and push, or name "
                        "the live version (POST /update_weight_version)"
                    )
                return update.ended
            update.touched_s = asyncio.get_running_loop().time()
            if update.selector is None:
                raise Conflict(
                    "no weight update was started; start one (POST /start_weight_update, "
                    "/begin_weight_update), or push without an update"
                )
            if update.succeeded != update.calls or update.owed:
                whose = (
                    f" of the {' and the '.join(sorted(update.owed, reverse=True))}"
                    if update.owed
                    else ""
                )
                raise Conflict(
                    f"the last push{whose} in this weight update failed or is in progress, so "
                    "there is nothing to make live; push again and then end it, or start another"
                )
            update.ended = await self._commit(update, name or update.name)
            update.name = name or update.name
            if update is self._update:
                self._update = Update(self, ended=update.ended, name=update.name)
            return update.ended

    async def _commit(self, update: Update, name: str) -> WeightReport:
        if update.holds:
            return await self.ask(CommitWeights, name=name, session=update.id)
        if name and not update.calls:
            raise Conflict(
                "nothing was pushed in this weight update, so there is no version to name "
                f"{name!r}; push and then end it, or start another and end it without a name "
                "(POST /update_weight_version outside of an update names the live version)"
            )
        if name and (target := update.reports.get("target")) is not None:
            return await self._name(name, of=target.state.target)
        looked = await self.look()
        return msgspec.structs.replace(looked, result="unchanged", version=looked.state.target)

    async def rename(self, version: str) -> None:
        """Name the version that the open session pushes; without a session, the live one."""
        self._tell("rename")
        if self._update.selector is not None:
            self._update.name, self._update.touched_s = version, asyncio.get_running_loop().time()
        else:
            await self._name(version)

    async def _name(self, version: str, of: str = "") -> WeightReport:
        self._engine.versions.check_name()
        return await self.ask(NameWeights, version, of)

    async def look(self, *, checksums: bool = False) -> WeightReport:
        return await self.ask(LookAtWeights, checksums)

    async def ask(
        self, kind: Callable[Concatenate[str, P], WeightCommand], *given: P.args, **also: P.kwargs
    ) -> WeightReport:
        """Return the engine's answer to a command with these fields, or raise the error in it."""
        return succeeded(await self.report(kind, *given, **also))

    async def report(
        self, kind: Callable[Concatenate[str, P], WeightCommand], *given: P.args, **also: P.kwargs
    ) -> WeightReport:
        command = kind(self._engine.command_id(), *given, **also)
        if isinstance(command, PushWeights):
            # An adoption is over soon.
            async with self._engine.adopting:
                pass
        report = await self._engine.weights(command)
        if isinstance(command, PushWeights | CommitWeights):
            self._note(report)
        return report

    def _note(self, report: WeightReport) -> None:
        """Count a push that became live, or was already."""
        if report.result in ("committed", "unchanged"):
            for role in self.arrivals:
                self.arrivals[role] += report.role in (role, "all")


def succeeded(report: WeightReport) -> WeightReport:
    if report.error is not None:
        raise from_code(*report.error)
    return report
