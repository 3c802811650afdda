"""Restarts the engine: one epoch after another, with growing pauses, until they end too often.

`launch(directory)` (from `build`) starts a process that connects to the sockets in `directory`.
`link` runs one epoch, and `client` is the rest of the frontend's view of all epochs. Only an engine
that has been ready once is restarted. A launch that the system refuses, for lack of descriptors or
memory, counts as a death.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import structlog
import zmq

from tlt_server.config import Config
from tlt_server.errors import EngineFailed, StartupError
from tlt_server.frontend.http.connections import Reserve
from tlt_server.frontend.link.client import EngineClient
from tlt_server.frontend.link.link import Death, EngineLink, EngineProcess
from tlt_server.frontend.link.starting import ProgressLines
from tlt_server.frontend.link.suspects import DEATHS
from tlt_server.metrics import Metrics
from tlt_server.process.private import private_directory
from tlt_server.wire.events import Ending, EngineInfo, Event, Phase, PhaseProgress, Ready

FIRST_DELAY_S, MAX_DELAY_S = 0.5, 30.0
SAID_EVERY_S = 1.0  # while the engine starts
NAMED = 16  # sequences in the log line of a death
# Facts of an engine in the log line that says that it is ready.
SAID_OF_ENGINE = (
    *("device", "gpu", "dtype", "attention", "products", "graphs", "max_running", "pages"),
    "choices",
)

log = structlog.get_logger()


class _Death(NamedTuple):
    at_s: float
    launched: bool
    owner: str


class Backoff:
    """The wait before the next epoch: none after a first death, then doubled for each further one
    in the window.
    """

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self._max_restarts, self._window_s = max_restarts, window_s
        self._deaths: deque[_Death] = deque()

    def death(self, at_s: float, *, launched: bool = True, owner: str = "") -> float | None:
        """Return the seconds to wait, or None if there were too many deaths. A launch that the
        system refused is never one too many, nor is a death by a key that rests. `owner`: the key
        whose requests alone can have caused it, if known.
        """
        self._deaths.append(_Death(at_s, launched, owner))
        while self._deaths[0].at_s <= at_s - self._window_s:
            self._deaths.popleft()
        count, by_owner = len(self._deaths), Counter(death.owner for death in self._deaths)
        resting = {name for name, deaths in by_owner.items() if name and deaths >= DEATHS}
        counted = [each for each in self._deaths if each.launched and each.owner not in resting]
        if launched and owner not in resting and len(counted) > self._max_restarts:
            return None
        return min(FIRST_DELAY_S * 2.0 ** min(count - 2, 32), MAX_DELAY_S) if count > 1 else 0.0


class Supervisor:
    def __init__(
        self,
        config: Config,
        launch: Callable[[Path], Awaitable[EngineProcess]],
        directory: Path,
        client: EngineClient,
        metrics: Metrics,
        progress: ProgressLines,
    ) -> None:
        self._config, self._launch, self._directory = config, launch, directory
        self._client, self._metrics, self._progress = client, metrics, progress
        self._backoff = Backoff(config.max_restarts, config.restart_window_s)
        self._reserve = Reserve()
        self._epochs = 0
        self._launched_s = 0.0  # when this epoch began
        self._gone_s = 0.0  # when the epoch before ended
        self._start_s = 0.0  # time that the last epoch took from its launch until it was ready

    async def run(self) -> EngineFailed:
        """Run one epoch after another, and return why there will be no further one. `StartupError`
        if the first was never ready. If cancelled, end the engine.
        """
        with contextlib.closing(self._reserve):
            while True:
                self._epochs += 1
                self._launched_s = time.monotonic()
                death = await self._live(self._directory / str(self._epochs))
                self._gone_s = time.monotonic()
                if self._client.info is None:
                    error = death.error
                    raise (
                        error if isinstance(error, StartupError) else StartupError(death.described)
                    )
                delay_s = self._backoff.death(
                    self._gone_s,
                    launched=death.ending != "not_launched",
                    owner=self._client.blame(death, self._gone_s),
                )
                self._died(death, delay_s)
                if delay_s is None:
                    return self._give_up(death)
                await asyncio.sleep(delay_s)

    async def _live(self, directory: Path) -> Death:
        """Run one epoch in its own directory, and return how it ended."""
        ending: Ending = "not_launched"
        saying = asyncio.create_task(self._say_how_far())
        try:
            with contextlib.ExitStack() as stack:
                with self._reserve.released():
                    link = stack.enter_context(contextlib.closing(self._connect(directory)))
                    process = await self._launch(directory)
                ending = "exited"
                return await link.run(process, self._take)
        except (OSError, zmq.ZMQError) as error:
            did = "launch the engine" if ending == "not_launched" else "say how the engine ended"
            reason = f"the system did not {did}: {error.strerror or error}"
            return Death(ending, EngineFailed(reason), set())
        finally:
            saying.cancel()
            shutil.rmtree(directory, ignore_errors=True)

    def _connect(self, directory: Path) -> EngineLink:
        private_directory(directory)
        link = EngineLink(
            directory,
            startup_timeout_s=self._config.startup_timeout_s,
            hang_timeout_s=self._config.hang_timeout_s,
        )
        self._client.replica.connect(link)
        return link

    def _died(self, death: Death, delay_s: float | None) -> None:
        """Log the death, and end or keep the open requests. `delay_s`: see `Backoff.death`."""
        log.error(
            "engine_gone",
            ending=death.ending,
            code=death.error.code,
            reason=death.error.message,
            lived_s=round(self._gone_s - self._launched_s, 3),
            open_sequences=len(self._client),
            ran=sorted(death.started)[:NAMED],
            ran_in_all=len(death.started),
            restart_in_s=delay_s,
        )
        waiting = self._client.died(death, delay_s, self._start_s)
        with self._client.faults.containing("the report of an engine that is gone"):
            if delay_s is not None:
                self._metrics.engine.restarts.labels(death.ending).inc()
                self._progress.died(death.described, delay_s, waiting)

    def _give_up(self, death: Death) -> EngineFailed:
        reason = (
            f"the engine ended more often than max_restarts {self._config.max_restarts} "
            f"allows within {self._config.restart_window_s:g} s (restart_window_s), at "
            f"last because {death.described}"
        )
        self._progress.gave_up(reason)
        return EngineFailed(reason)

    def _take(self, event: Event) -> None:
        self._client.take(event)
        with self._client.faults.containing("the report of a start"):
            self._tell(event)

    def _tell(self, event: Event) -> None:
        if isinstance(event, Phase):
            self._progress.phase(event)
        if isinstance(event, PhaseProgress):
            self._say_under_way()
        if isinstance(event, Ready):
            now_s = time.monotonic()
            self._start_s = now_s - self._launched_s
            if self._epochs == 1:
                said = {name: getattr(event.info, name) for name in SAID_OF_ENGINE}
                log.info("engine_ready", seconds=round(self._start_s, 3), **said)
            else:
                self._back(event.info, now_s - self._gone_s)

    async def _say_how_far(self) -> None:
        """Show the current phase of a start, even if none of its steps are counted."""
        while not self._client.replica.start.over:
            await asyncio.sleep(SAID_EVERY_S)
            self._say_under_way()

    def _say_under_way(self) -> None:
        if doing := self._client.replica.start.under_way:
            self._progress.under_way(doing)

    def _back(self, info: EngineInfo, after_s: float) -> None:
        log.warning("engine_back", epoch=self._epochs, seconds=round(after_s, 3), lost=info.lost)
        self._progress.back(info, after_s, len(self._client))
        if self._client.versions.lost:
            self._progress.lost(self._client.versions.reason)
