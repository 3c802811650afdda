"""Drafters of the server's own trainer: hands it the weights in force and pushes what it proved
better, by the transaction that every push takes.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from pathlib import Path

import structlog

from tlt_client.channels import TRAINED
from tlt_server.errors import Conflict, TltError, Unavailable
from tlt_server.frontend.link.client import EngineClient
from tlt_server.frontend.weights.session import WeightSession
from tlt_server.wire.commands import HandOver, Manifest, RollbackWeights
from tlt_server.wire.events import WeightReport
from tlt_server.wire.training import HandedOver, Offer, Verdict

log = structlog.get_logger()


class Adoption:
    def __init__(self, engine: EngineClient, session: WeightSession, drafter: Path | None) -> None:
        """`drafter`: the directory that the server was started with; None: without a network."""
        self._engine, self._session, self._drafter = engine, session, drafter
        self._numbers = itertools.count(1)

    async def hand_over(self, directory: Path) -> HandedOver:
        """Have the weights in force written below the directory."""
        place = directory / f"handed-{next(self._numbers)}"
        try:
            report = await self.write(place)
            if (info := self._engine.info) is None:
                raise Unavailable("the engine has ended")
        except TltError as error:
            await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)
            return HandedOver(error=error.message)
        return HandedOver(
            directory=str(place),
            target=report.state.target,
            drafter=report.state.drafter,
            device=info.training_device,
            leaves=info.fingerprint.leaves,
            longest=info.max_model_len,
        )

    async def write(self, directory: Path) -> WeightReport:
        """Have the weights in force written into a new directory. `Conflict` without a drafter's
        network, or the engine's error.
        """
        if self._drafter is None:
            raise Conflict(
                "this server drafts without a network; restart it with --drafter DIR for one"
            )
        id, drafter = self._engine.command_id(), str(self._drafter.resolve())
        return await self._session.ask(HandOver(id, str(directory), drafter))

    async def adopt(self, offer: Offer) -> Verdict:
        """Push a candidate. A target that has changed, and a push in progress, refuse it."""
        manifest = Manifest(
            role="drafter",
            version=offer.version,
            channel=TRAINED,
            path=Path(offer.directory).name,
            of=offer.target_version,
        )
        # Also where no one waits for the answer: a lost drafter of our own stops no request.
        self._engine.versions.own.add(offer.version)
        try:
            await self._session.adopt(manifest)
        except TltError as error:
            log.warning("drafter_refused", version=offer.version, reason=error.message)
            return Verdict(version=offer.version, refused=error.code, error=error.message)
        log.info("drafter_adopted", version=offer.version, target=offer.target_version)
        return Verdict(version=offer.version)

    async def roll_back(self) -> WeightReport:
        """Make the drafter before the live one live again. `Conflict` where none is kept."""
        if self._drafter is None:
            raise Conflict("this server drafts without a network; there is nothing to go back to")
        id = self._engine.command_id()
        return await self._session.ask(RollbackWeights(id, role="drafter"))
