"""Runs the trainer process: starts it, takes its reports, and starts another one when it ends.

Nothing depends on it: while it is away, finished sequences are dropped and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec
import structlog

from tlt_server.events import BufferReport
from tlt_server.metrics.samples import SampleMetrics
from tlt_server.samples.excerpt import Excerpt, SampleFiles

END_S = 5.0  # time for a process to keep what the ring still has
FIRST_DELAY_S, MAX_DELAY_S = 0.5, 60.0
STEADY_S = 60.0  # a process that lived this long was well
REFUSALS = 16  # the last ones that are kept

TrainerPhase = Literal["starting", "recording", "failed"]

log = structlog.get_logger()


class TrainerLink:
    def __init__(
        self,
        launch: Callable[[], Awaitable[Process]],
        metrics: SampleMetrics,
        files: SampleFiles | None,
    ) -> None:
        """`files`: the segment files that the process writes; None: it writes none."""
        self._launch, self._metrics, self.files = launch, metrics, files
        self.report = BufferReport()
        self.phase: TrainerPhase = "starting"
        self.error = ""  # how the last process ended; empty: none has
        self.restarts = 0
        self.refusals: deque[str] = deque(maxlen=REFUSALS)
        self._reading = asyncio.Lock()

    async def run(self) -> None:
        """Run one process after another, until cancelled."""
        delay_s = FIRST_DELAY_S
        while True:
            started_s = asyncio.get_running_loop().time()
            self.phase = "starting"
            try:
                status = await self._live()
            except OSError as error:
                status = f"not started: {error.strerror}"
            except ValueError as error:  # a line is no report, or is longer than it may be
                status = f"its report is not read: {error}"
            lived_s = asyncio.get_running_loop().time() - started_s
            self.phase, self.error = "failed", status
            delay_s = FIRST_DELAY_S if lived_s >= STEADY_S else min(2 * delay_s, MAX_DELAY_S)
            log.error("trainer_gone", status=status, lived_s=round(lived_s, 3), again_in_s=delay_s)
            await asyncio.sleep(delay_s)
            self._metrics.restarts.inc()
            self.restarts += 1

    async def excerpt(self, files: SampleFiles, after: int, limit: int) -> Excerpt:
        """Read recorded sequences in a thread, for one caller at a time."""
        async with self._reading:
            return await asyncio.to_thread(files.read, after, limit)

    async def _live(self) -> str:
        process = await self._launch()
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                self._take(msgspec.json.decode(line, type=BufferReport))
            status = await process.wait()
            return f"ended by signal {-status}" if status < 0 else f"exit status {status}"
        finally:
            await _end(process)

    def _take(self, report: BufferReport) -> None:
        self.phase = "recording"
        self.refusals.extend(report.refusals)
        for refusal in report.refusals:
            log.warning("sample_refused", reason=refusal)
        if report.disk_error != self.report.disk_error:
            log.warning("samples_on_disk", error=report.disk_error or "none: files again")
        self.report = report
        self._metrics.took(report)


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), END_S)
        except TimeoutError:
            process.kill()
            await process.wait()
