"""A session around a weight update, as trainers open and close one: what is pushed in between becomes live at its end, or nothing does.

Beneath is one transaction (`weights/transaction.py`): a push inside a session stays staged, and the end commits it, under the name that
the trainer gives last. Outside a session, and where nothing can be staged (`weight_staging` none), a push commits by itself. Only this
server's one session is known; all dialects share it, and every push of weights comes through it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tlt_server.errors import Conflict, from_code
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


class WeightSession:
    def __init__(self, engine: EngineClient, *, stages: bool) -> None:
        """`stages`: a version lies somewhere else than the one in use until it is committed."""
        self._engine, self._stages = engine, stages
        self._selector: Selector | None = None  # of the session that is open
        self._staged = ""  # version that waits for the end
        self._name = ""  # for what becomes live at the end
        self._ended: WeightReport | None = None  # the last session's, until another begins: for a repeated end

    @property
    def open(self) -> bool:
        return self._selector is not None

    @property
    def role(self) -> Role:
        """Of a push that does not say whose weights it brings."""
        return "drafter" if self._selector == "draft" else "target"

    async def begin(self, selector: Selector) -> None:
        """What an earlier session left staged is dropped; a repeated begin changes nothing else."""
        staged, self._staged = self._staged, ""
        if staged:
            await self.ask(AbortWeights(self._engine.command_id(), staged))
        self._selector, self._name, self._ended = selector, "", None

    async def push(self, manifest: Manifest) -> WeightReport:
        """Live when this returns; or staged, inside a session."""
        if self.open and self._stages:
            manifest = msgspec.structs.replace(manifest, commit=False)
        report = await self.ask(PushWeights(self._engine.command_id(), manifest))
        if self.open and report.result == "staged":
            self._staged = report.version
        return report

    async def end(self, name: str = "") -> WeightReport:
        """Commit what was pushed. A repeated end is answered as the first; `Conflict` without a session."""
        if self._selector is None:
            if self._ended is not None:
                return self._ended
            raise Conflict("no weight update was begun; begin one (POST /start_weight_update, /begin_weight_update), or push without")
        name = name or self._name
        staged, self._staged, drafter = self._staged, "", self._selector == "draft"
        self._selector = None
        if staged:
            report = await self.ask(CommitWeights(self._engine.command_id(), staged, name))
        elif name and not drafter:
            report = await self.ask(NameWeights(self._engine.command_id(), name))
        else:
            looked = await self.look()
            report = msgspec.structs.replace(looked, result="unchanged", version=looked.state.target)
        self._ended = report
        return report

    async def rename(self, version: str) -> None:
        """Name what the open session pushes, or else what is live."""
        if self._selector is not None:
            self._name = version
        else:
            await self.ask(NameWeights(self._engine.command_id(), version))

    async def look(self, *, checksums: bool = False) -> WeightReport:
        return await self.ask(LookAtWeights(self._engine.command_id(), checksums))

    async def ask(self, command: WeightCommand) -> WeightReport:
        """The engine's answer, or the error that it is."""
        report = await self._engine.weights(command)
        if report.error is not None:
            raise from_code(*report.error)
        return report
