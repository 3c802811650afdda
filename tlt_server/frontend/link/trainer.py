"""Runs the trainer process: starts it, takes its reports, and starts another one when it ends.

Nothing depends on it: while it is away, finished sequences are dropped and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable

import msgspec
import structlog

from tlt_server.events import BufferReport
from tlt_server.metrics.samples import SampleMetrics

END_S = 5.0  # time for a process to keep what the ring still has
FIRST_DELAY_S, MAX_DELAY_S = 0.5, 60.0
STEADY_S = 60.0  # a process that lived this long was well

log = structlog.get_logger()


class TrainerLink:
    def __init__(self, launch: Callable[[], Awaitable[Process]], metrics: SampleMetrics) -> None:
        self._launch, self._metrics = launch, metrics
        self.report = BufferReport()

    async def run(self) -> None:
        """Run one process after another, until cancelled."""
        delay_s = FIRST_DELAY_S
        while True:
            started_s = asyncio.get_running_loop().time()
            try:
                status = await self._live()
            except OSError as error:
                status = f"not started: {error.strerror}"
            lived_s = asyncio.get_running_loop().time() - started_s
            delay_s = FIRST_DELAY_S if lived_s >= STEADY_S else min(2 * delay_s, MAX_DELAY_S)
            log.error("trainer_gone", status=status, lived_s=round(lived_s, 3), again_in_s=delay_s)
            await asyncio.sleep(delay_s)
            self._metrics.restarts.inc()

    async def _live(self) -> str:
        process = await self._launch()
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                self._take(msgspec.json.decode(line, type=BufferReport))
            return str(await process.wait())
        finally:
            await _end(process)

    def _take(self, report: BufferReport) -> None:
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
