"""Moves the drafter out of the engine and into it: hands it to the server's trainer with the active
weights, exports it, and replaces it by the trainer's proven candidate, through the same transaction
as every push.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, NamedTuple

import structlog

from tlt_client.channels import TRAINED
from tlt_server.errors import Conflict, StorageFailed, TltError, Unavailable
from tlt_server.frontend.link.client import EngineClient
from tlt_server.frontend.weights.session import WeightSession
from tlt_server.process.private import private_directory
from tlt_server.wire.commands import HandOver, Manifest, RollbackWeights
from tlt_server.wire.events import WeightReport
from tlt_server.wire.training import HandedOver, Offer, Verdict

if TYPE_CHECKING:
    from tlt_server.config import ResolvedConfig

log = structlog.get_logger()


class Adoption:
    def __init__(self, engine: EngineClient, session: WeightSession, drafter: Path | None) -> None:
        """`drafter`: the directory that the server was started with; None: without a network."""
        self._engine, self._session, self._drafter = engine, session, drafter
        self._numbers = itertools.count(1)

    async def hand_over(self, directory: Path) -> HandedOver:
        """Write the active weights below the directory."""
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
            quantization=report.state.drafter_quantization,
            device=info.training_device,
            leaves=info.fingerprint.leaves,
            longest=info.max_model_len,
        )

    async def write(self, directory: Path) -> WeightReport:
        """Write the active weights into a new directory. `Conflict` without a drafter's network, or
        the engine's error.
        """
        if self._drafter is None:
            raise Conflict(
                "this server drafts without a network; restart it with --drafter DIR for one"
            )
        drafter = str(self._drafter.resolve())
        return await self._session.ask(HandOver, str(directory), drafter)

    async def adopt(self, offer: Offer) -> Verdict:
        """Push a candidate. A changed target or a push in progress refuses it."""
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
        """Restore the previous drafter. `Conflict` if none is kept."""
        if self._drafter is None:
            raise Conflict(
                "this server drafts without a network; there is no drafter to roll back to"
            )
        return await self._session.ask(RollbackWeights, role="drafter")


EXPORTS = "exports"  # in the state directory
MAX_SAID = 2000  # characters of the export's own words
EXPORTER = (sys.executable, "-P", "-m", "tlt_server", "drafter", "export")
EXPORT_S = 600.0  # time for it to write, read back and compare


class ExportedDrafter(NamedTuple):
    directory: Path
    version: str
    said: str


class DrafterExports:
    """Exports of the live drafter: the engine writes it, and `tlt drafter export`, in a separate
    process, converts it to another engine's layout.
    """

    def __init__(self, config: ResolvedConfig, adoption: Adoption) -> None:
        self._config, self._adoption = config, adoption
        self._one = asyncio.Lock()

    async def clear(self) -> None:
        """Remove the remains of unfinished exports; names of other files do not begin with a
        dot.
        """
        if self._config.state_dir is not None:
            for left in (self._config.state_dir / EXPORTS).glob(".*"):
                await asyncio.to_thread(shutil.rmtree, left, ignore_errors=True)

    async def write(self, name: str, layout: str) -> ExportedDrafter:
        """Write the live drafter as `exports/name`. `Conflict` without a state directory, for a
        name in use, during another export, or if the layout does not fit; `Unavailable` if it takes
        too long.
        """
        state = self._config.state_dir
        if state is None:
            raise Conflict(
                "exports are kept below the state directory; restart the server with --state-dir"
            )
        if self._one.locked():
            raise Conflict("another export is in progress; ask again once it is answered")
        async with self._one:
            directory = state.resolve() / EXPORTS / name
            if directory.exists():
                raise Conflict(f"{directory} exists; choose another name, or remove it")
            try:
                private_directory(directory.parent, parents=True, exist_ok=True)
                work = Path(mkdtemp(prefix=".export-", dir=directory.parent))
            except OSError as error:
                raise StorageFailed(f"{directory.parent} cannot be written: {error}") from None
            try:
                report = await self._adoption.write(work / "live")
                version = report.state.drafter
                said = await self._run(work / "live" / "drafter", directory, layout, version)
            finally:
                await self.clear()
        return ExportedDrafter(directory, version, said)

    async def _run(self, drafter: Path, directory: Path, layout: str, version: str) -> str:
        flags = {
            "--target": str(self._config.model.resolve()),
            "--drafter": str(drafter),
            "--layout": layout,
            "--out": str(directory),
            "--version": version,
        }
        environment = {**os.environ}
        environment.pop(self._config.api_key_variable, None)
        process = await asyncio.create_subprocess_exec(
            *EXPORTER,
            *(word for pair in flags.items() for word in pair),
            stdout=PIPE,
            stderr=STDOUT,
            env=environment,
        )
        try:
            async with asyncio.timeout(EXPORT_S):
                output, _ = await process.communicate()
        except TimeoutError:
            raise Unavailable(
                f"the export was not done within {EXPORT_S:g} s, so it was ended; ask again while "
                "the machine has less to do, or run tlt drafter export yourself"
            ) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        said = output.decode(errors="replace").strip()[-MAX_SAID:]
        if process.returncode:
            raise Conflict(f"the drafter was not exported: {said}")
        return said
