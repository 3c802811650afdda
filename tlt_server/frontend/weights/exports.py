"""Exports of the live drafter: the engine writes it, and `tlt drafter export`, in a process of its
own, turns it into the layout of another engine.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, NamedTuple

from tlt_server.errors import Conflict, StorageFailed, Unavailable
from tlt_server.frontend.weights.adoption import Adoption
from tlt_server.process.private import private_directory

if TYPE_CHECKING:
    from tlt_server.config import ResolvedConfig

EXPORTS = "exports"  # in the state directory
MAX_SAID = 2000  # characters of the export's own words
EXPORTER = (sys.executable, "-P", "-m", "tlt_server", "drafter", "export")
EXPORT_S = 600.0  # time for it to write, read back and compare


class ExportedDrafter(NamedTuple):
    directory: Path
    version: str
    said: str


class DrafterExports:
    def __init__(self, config: ResolvedConfig, adoption: Adoption) -> None:
        self._config, self._adoption = config, adoption
        self._one = asyncio.Lock()

    async def clear(self) -> None:
        """Remove what exports that did not end have left; names of others begin with no dot."""
        if self._config.state_dir is not None:
            for left in (self._config.state_dir / EXPORTS).glob(".*"):
                await asyncio.to_thread(shutil.rmtree, left, ignore_errors=True)

    async def write(self, name: str, layout: str) -> ExportedDrafter:
        """Write the live drafter as `exports/name`. `Conflict` without a state directory, for a
        name in use, during another export, and where the layout does not fit; `Unavailable`
        where it takes too long.
        """
        state = self._config.state_dir
        if state is None:
            raise Conflict(
                "exports are kept below the state directory; restart the server with --state-dir"
            )
        if self._one.locked():
            raise Conflict("another export is on its way; ask again once it is answered")
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
