"""Runs the trainer process: starts it, reads its reports, passes its requests to the engine, and
starts another one when it ends or hangs.

Nothing depends on it: while it is away, finished sequences are dropped and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Literal, Protocol

import structlog

from tlt_server.errors import Unavailable
from tlt_server.frontend.link.answers import Changes
from tlt_server.frontend.link.client import EngineClient
from tlt_server.metrics.training import SampleMetrics, TrainingMetrics
from tlt_server.samples.excerpt import Excerpt, SampleFiles
from tlt_server.wire.commands import Recompute
from tlt_server.wire.events import BufferReport
from tlt_server.wire.training import (
    Do,
    HandedOver,
    InForce,
    Judged,
    Offer,
    Order,
    SpotReport,
    ToTrainer,
    Verdict,
    WeightsWanted,
    candidate_directory,
    line_of,
    read_from_trainer,
)

END_S = 5.0  # time for a process to keep what the ring still has
FIRST_DELAY_S, MAX_DELAY_S = 0.5, 60.0
STEADY_S = 60.0  # a process that lived this long was well
# Time without a report after which a process is taken for hung; a segment is short.
SILENT_S = 120.0
ANSWER_S = 30.0  # time for an order to be carried out: a segment may run
RELEASE_S = 30.0  # time for memory to be given back: a segment ends, a checkpoint is written
REFUSALS = 16  # the last ones that are kept

ProcessPhase = Literal["starting", "running", "failed"]

log = structlog.get_logger()


class Weights(Protocol):
    """Access to the engine's weights."""

    async def hand_over(self, directory: Path) -> HandedOver: ...

    async def adopt(self, offer: Offer) -> Verdict: ...


class TrainerLink:
    def __init__(
        self,
        launch: Callable[[], Awaitable[Process]],
        metrics: SampleMetrics,
        files: SampleFiles | None,
        work: Path | None = None,
        training: TrainingMetrics | None = None,
    ) -> None:
        """`files`: the segment files that the process writes; None: it writes none. `work`: the
        directory for handed-over weights and candidates; None: it does not train.
        """
        self._launch, self._metrics, self.files = launch, metrics, files
        self._work, self._training = work, training
        self.report, self.spot = BufferReport(), SpotReport()
        self.phase: ProcessPhase = "starting"
        self.error = ""  # how the last process ended; empty: none has
        self.restarts = 0
        self.refusals: deque[str] = deque(maxlen=REFUSALS)
        self._heard_s = 0.0  # time of the last report, or of the start
        self._reading = asyncio.Lock()
        self._process: Process | None = None
        self._engine: EngineClient | None = None
        self._weights: Weights | None = None
        self._errands: set[asyncio.Task[None]] = set()
        self._adoption: asyncio.Task[None] | None = None  # the last one
        self._orders = 0
        self._paused = False  # by an operator's order, which outlives the process
        self._hold: asyncio.TimerHandle | None = None  # ends a pause for a time
        self._reports = Changes()

    async def run(self, engine: EngineClient | None = None, weights: Weights | None = None) -> None:
        """Run one process after another, until cancelled. `engine`: its versions are sent to the
        process. `weights`: executes its requests.
        """
        self._engine, self._weights = engine, weights
        delay_s = FIRST_DELAY_S
        while True:
            started_s = self._heard_s = asyncio.get_running_loop().time()
            self.phase, self.spot = "starting", SpotReport()
            try:
                status = await self._live(engine)
            except OSError as error:
                status = f"not started: {error.strerror}"
            except ValueError as error:  # a line is no report, or is longer than it may be
                status = f"its report is not read: {error}"
            except Exception as error:
                log.exception("trainer_link_failed")
                status = f"internal error: {error}"
            lived_s = self._heard_s - started_s
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

    @property
    def trains(self) -> bool:
        """Return True if the process trains, False if it only keeps sequences."""
        return self._work is not None

    @property
    def candidate(self) -> tuple[Judged, Path] | None:
        """Return the last judged candidate, with its directory, which the next one replaces."""
        judged = self.spot.candidate
        if judged is None or self._work is None:
            return None
        return judged, self._work / candidate_directory(judged.candidate)

    @property
    def device(self) -> str:
        """Return the device that trains; empty before the engine was ready."""
        info = self._engine.info if self._engine is not None else None
        return info.training_device if info is not None else ""

    @property
    def slowdown(self) -> float | None:
        """Return the ratio of a step's time during training to its time without; None if
        unknown.
        """
        engine = self._engine
        return engine.replica.gauges.get("training_slowdown") if engine is not None else None

    async def order(self, do: Literal["train", "pause", "resume"]) -> SpotReport:
        """Return the report after an order. `Unavailable` if none arrives. A pause is answered once
        a pending offer has its verdict; later offers are refused.
        """
        if do != "train":
            self._paused = do == "pause"
            self._hold_for(0)
        return await self._carried_out(do)

    async def hold(self, for_s: float) -> SpotReport:
        """Pause for a time, as by `order`, counted from the last such call; 0 ends such a pause.
        Nothing changes if the trainer is already paused by an operator or after a fault.
        """
        self._hold_for(for_s)
        return await self._carried_out("hold" if for_s else "release")

    @property
    def hold_left_s(self) -> float | None:
        """Return the remaining time of a timed pause; None if there is none."""
        if self._hold is None or not self.spot.held:
            return None
        return max(0.0, self._hold.when() - asyncio.get_running_loop().time())

    def _hold_for(self, for_s: float) -> None:
        if self._hold is not None:
            self._hold.cancel()
        loop = asyncio.get_running_loop()
        self._hold = loop.call_later(for_s, self._release) if for_s else None

    def _release(self) -> None:
        self._hold = None
        self._give("release")

    async def _carried_out(self, do: Do) -> SpotReport:
        number = self._give(do)
        pauses = do in ("pause", "hold")
        if pauses and self._adoption is not None and not self._adoption.done():
            await asyncio.wait({self._adoption}, timeout=ANSWER_S)
            if not self._adoption.done():
                raise Unavailable(
                    "the trainer pauses, but the engine has not yet taken or refused the drafter "
                    "that it offered before; ask again",
                    retry_after_s=1,
                )
            number = self._give(do)  # the answer to this one follows the verdict
        if self.phase == "running" and number:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    while self.spot.answered < number:
                        await self._reports.next.wait()
                    return self.spot
        raise Unavailable(
            f"the trainer process does not answer ({self.phase}{self.error and ': ' + self.error})"
            "; it is started again when it has ended: ask again, GET /drafter says how it is",
            retry_after_s=1,
        )

    async def gave_back(self, sleep: int) -> bool:
        """Wait until the process has freed its memory for this sleep. Return False if it has not in
        time.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RELEASE_S):
                while self.trains and self._process is not None and self.spot.slept < sleep:
                    await self._reports.next.wait()
                return True
        return False

    def _give(self, do: Do) -> int:
        """Send an order, and return its number; 0 if no process takes it."""
        self._orders += 1
        return self._orders if self._send(Order(number=self._orders, do=do)) else 0

    def _send(self, message: ToTrainer) -> bool:
        pipe = self._process.stdin if self._process is not None else None
        if pipe is None or pipe.is_closing():
            return False
        pipe.write(line_of(message))
        return True

    async def _live(self, engine: EngineClient | None) -> str:
        if self._work is not None:
            await asyncio.to_thread(_empty, self._work)
        process = self._process = await self._launch()
        if self._paused or self._hold is not None:
            self._send(Order(number=self._orders, do="pause" if self._paused else "hold"))
        following = None
        if engine is not None and self._work is not None:
            following = asyncio.create_task(self._follow(engine))
        try:
            assert process.stdout is not None
            try:
                while line := await _line(process.stdout):
                    self._heard_s = asyncio.get_running_loop().time()
                    self._take(line)
            except TimeoutError:
                return f"no report for {SILENT_S:g} s, so it was ended"
            status = await process.wait()
            return f"ended by signal {-status}" if status < 0 else f"exit status {status}"
        finally:
            self._process = None
            if engine is not None:
                engine.activity.trainer_ended()
            self._reports.tell()
            for task in filter(None, (following, *self._errands)):
                task.cancel()
            await _end(process)

    async def _follow(self, engine: EngineClient) -> None:
        """Send the process the active versions."""
        told: InForce | None = None
        while True:
            changed = engine.changes.next
            if engine.info is not None:
                info = engine.info
                how = info.drafter_quantization
                live = InForce(info.weight_version, info.drafter_version, how)
                if live != told and self._send(live):
                    told = live
            await changed.wait()

    def _take(self, line: bytes) -> None:
        match read_from_trainer(line):
            case BufferReport() as report:
                self._keeps(report)
            case SpotReport() as report:
                self.spot = report
                if self._training is not None:
                    self._training.took(report)
                self._reports.tell()
            case WeightsWanted():
                self._start(self._hand_over())
            case Recompute() as wanted:
                if self._engine is not None:
                    self._engine.recompute(wanted)
            case Offer() as offer:
                self._adoption = self._start(self._adopt(offer))

    def _keeps(self, report: BufferReport) -> None:
        self.phase = "running"
        self.refusals.extend(report.refusals)
        for refusal in report.refusals:
            log.warning("sample_refused", reason=refusal)
        if report.disk_error != self.report.disk_error:
            log.warning("samples_on_disk", error=report.disk_error or "none: files again")
        self.report = report
        self._metrics.took(report)

    def _start(self, errand: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(errand)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)
        return task

    async def _hand_over(self) -> None:
        assert self._weights is not None and self._work is not None
        self._send(await self._weights.hand_over(self._work))

    async def _adopt(self, offer: Offer) -> None:
        assert self._weights is not None
        if self._paused or self._hold is not None:
            error = "the trainer is paused"
            self._send(Verdict(version=offer.version, refused="paused", error=error))
            return
        try:
            verdict = await self._weights.adopt(offer)
        except Exception as error:  # every offer has its verdict, or the trainer waits for ever
            log.exception("adoption_failed", version=offer.version)
            verdict = Verdict(version=offer.version, refused="internal", error=str(error))
        self._send(verdict)


def _empty(directory: Path) -> None:
    """Remove weights handed to an earlier process, and its files."""
    for path in directory.glob("*"):
        shutil.rmtree(path, ignore_errors=True)


async def _line(stdout: asyncio.StreamReader) -> bytes:
    """Return the next line; empty at the end. `TimeoutError` if none arrives. `wait_for` would not
    do: in Python 3.11 it loses a cancellation that arrives with the line.
    """
    async with asyncio.timeout(SILENT_S):
        return await stdout.readline()


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
