"""A session around a weight update, as trainers open and close one: what is pushed in between becomes live at its end, or nothing does.

Beneath is one transaction (`weights/transaction.py`): a push inside a session stays staged, and the end commits it, under the name that
the trainer gives last. Outside a session, and where nothing can be staged (`weight_staging` none), a push commits by itself. Only this
server's one session is known; all dialects share it, and every push of weights comes through it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Literal

import msgspec
from pydantic import Field

from tlt_server.errors import Conflict, NotFound, from_code
from tlt_server.frontend.engine_client import EngineClient
from tlt_server.records import (
    AbortWeights,
    CommitWeights,
    LookAtWeights,
    Manifest,
    NameWeights,
    PushWeights,
    Role,
    WeightCommand,
    WeightReport,
)

Selector = Literal["target", "draft", "all"]
Version = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^/\x00-\x1f\x7f]+$",
                               description="a name without slash or control characters, which every token will carry")]


class WeightSession:
    def __init__(self, engine: EngineClient, *, stages: bool) -> None:
        """`stages`: a version lies somewhere else than the one in use until it is committed."""
        self._engine, self._stages = engine, stages
        self.selector: Selector | None = None  # of the session that is open
        self._id = ""  # by which the engine knows what is pushed in it
        self._staged: str | None = None  # version that waits for the end; empty while it has no name
        self._name = ""  # for what becomes live at the end
        self._failed = False  # the session's last push
        self._ended: WeightReport | None = None  # the last session's, until another begins: for a repeated end

    @property
    def open(self) -> bool:
        return self.selector is not None

    @property
    def role(self) -> Role:
        """Of a push that does not say whose weights it brings."""
        return "drafter" if self.selector == "draft" else "target"

    async def begin(self, selector: Selector) -> None:
        """What an earlier session left staged is dropped; a repeated begin changes nothing else."""
        staged, self._staged = self._staged, None
        if staged is not None:
            with suppress(NotFound):  # somebody else has ended it
                await self.ask(AbortWeights(self.command_id(), staged))
        self.selector, self._id, self._name, self._failed, self._ended = selector, self.command_id(), "", False, None

    async def push(self, manifest: Manifest) -> WeightReport:
        """Live when this returns; or staged, inside a session; or gathering, where the manifest is partial and tensors are missing."""
        if self.open:
            manifest = msgspec.structs.replace(manifest, session=self._id, commit=manifest.commit and not self._stages)
        self._failed, self._ended = self.open, None
        report = await self.ask(PushWeights(self.command_id(), manifest))
        self._failed = False
        if self.open and report.result in ("staged", "gathering"):
            self._staged = report.version
        return report

    async def end(self, name: str = "") -> WeightReport:
        """Commit what was pushed. A repeated end is answered as the first; `Conflict` without a session.

        Where nothing can be committed the session stays open: what is missing may still be pushed, or another name given.
        """
        if self.selector is None:
            if self._ended is not None:
                return self._ended
            raise Conflict("no weight update was begun; begin one (POST /start_weight_update, /begin_weight_update), or push without")
        if self._failed:
            raise Conflict("the last push of this weight update failed, so there is nothing to make live; push again and then end it, or "
                           "begin another")
        self._ended = await self._commit(name or self._name)
        self.selector = self._staged = None
        return self._ended

    async def _commit(self, name: str) -> WeightReport:
        if self._staged is not None:
            return await self.ask(CommitWeights(self.command_id(), self._staged, name))
        if name and self.selector != "draft":
            return await self.ask(NameWeights(self.command_id(), name))
        looked = await self.look()
        return msgspec.structs.replace(looked, result="unchanged", version=looked.state.target)

    async def rename(self, version: str) -> None:
        """Name what the open session pushes, or else what is live."""
        if self.selector is not None:
            self._name = version
        else:
            await self.ask(NameWeights(self.command_id(), version))

    async def look(self, *, checksums: bool = False) -> WeightReport:
        return await self.ask(LookAtWeights(self.command_id(), checksums))

    def command_id(self) -> str:
        return self._engine.command_id()

    async def ask(self, command: WeightCommand) -> WeightReport:
        """The engine's answer, or the error that it is."""
        report = await self._engine.weights(command)
        if report.error is not None:
            raise from_code(*report.error)
        return report
