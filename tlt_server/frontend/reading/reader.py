"""The reading process from the outside: started, asked, watched, ended.

It has one socket and one thread per lane, so a small job never waits for a large one, and each lane
runs one slice at a time. Jobs that wait when the process dies go to the next one. If several were
running, each is then tried alone, so the one that ends the process is identified: it gets a typed
error, and its key rests, each time twice as long, while other keys continue at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog

from tlt_server.errors import TltError, TooLarge, Unavailable
from tlt_server.frontend.reading.frames import Channel
from tlt_server.frontend.reading.jobs import Job, JobQueue, Patience, Slice, exchange
from tlt_server.frontend.reading.renderer import Renderer

FIRST_S, MAX_S = 0.25, 30.0
CALM_S = 60.0  # without a failure, after which the next wait is the first again
LANES = (2**16, 2**20, 2**62)  # bytes of a job in the first lane, of one slice in the others
MEMORY_MB = 4096  # what the process may have in addition to what it has after its start
HANG_S = 120.0  # time of one slice; the largest takes about 15 s
TRIAL_S = 30.0  # likewise of a job on trial, for which all others wait
TICK_S = 1 / os.sysconf("SC_CLK_TCK")  # unit of a process's times
# -P: a module in the current directory is none of ours.
COMMAND = (sys.executable, "-P", "-m", "tlt_server.frontend.reading_process")
# One thread per lane is all that it gets: the cores are the engine's.
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
log = structlog.get_logger()


class DoublingWait:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last_s, self._wait_s = clock, -math.inf, 0.0

    def longer(self) -> float:
        """Return the seconds to wait after another failure."""
        now_s = self._clock()
        again = now_s - self._last_s < CALM_S
        self._wait_s = min(MAX_S, 2 * self._wait_s) if again else FIRST_S
        self._last_s = now_s
        return self._wait_s


class Reader:
    """The reading process of one server, over all its restarts."""

    def __init__(
        self,
        model: Path,
        *,
        secrets: Iterable[str] = (),
        hang_s: float = HANG_S,
        memory_mb: int = MEMORY_MB,
    ) -> None:
        """`model`: the directory with the tokenizer. `secrets`: environment variables that the
        process does not get.
        """
        self._hello = msgspec.json.encode({"model": str(model.resolve()), "memory_mb": memory_mb})
        self._environment = {
            name: value for name, value in os.environ.items() if name not in {*secrets}
        } | ENVIRONMENT
        self.renderer = Renderer(self._environment)
        self._hang_s, self._memory_mb = hang_s, memory_mb
        self._resting: set[str] = set()  # keys
        self._waits: dict[str, DoublingWait] = {}  # by key
        self._lanes = [JobQueue(self._resting) for _ in LANES]
        self._under_way: list[Job | None] = [None for _ in LANES]
        self._on_trial = deque[tuple[int, Job]]()  # with the lanes
        self._hung: Job | None = None
        self._running: asyncio.Task[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.closed = False

    def start(self) -> None:
        """Start the process unless it is running. The first job does so too."""
        if self.closed:
            raise _closed()
        if self._running is None:
            self._running = asyncio.create_task(self._run())

    @property
    def pid(self) -> int | None:
        """Id of the process; None without one."""
        return self._process.pid if self._process is not None else None

    async def ask(
        self,
        key: str,
        slices: Iterable[Slice],
        *,
        total: int,
        largest: int,
        patience: Patience | None = None,
    ) -> list[Any]:
        """Return the value of each slice. `total` and `largest`: bytes of all slices and of the
        largest one. If this is cancelled, no further slice runs.
        """
        self.start()
        job = Job(key, slices, patience)
        if job.slice is None:
            return []
        lane = 0 if total <= LANES[0] else next(i for i in (1, 2) if largest <= LANES[i])
        self._lanes[lane].add(job)
        try:
            return await job.done
        finally:
            job.done.cancel()

    def close(self) -> None:
        """End the process and all waiting jobs."""
        self.closed = True
        self.renderer.close()
        if self._running is not None:
            self._running.cancel()
        if self._process is not None:
            self._process.kill()
        for queue in self._lanes:
            queue.end(_closed)
        for job in [*self._under_way, *(job for _, job in self._on_trial)]:
            if job is not None:
                job.fail(_closed())

    async def _run(self) -> None:
        wait = DoublingWait()
        while True:
            try:
                status: int | str = await self._epoch()
            except OSError as error:  # no descriptor or no memory is left for a process
                status = f"not launched: {error.strerror}"
            wait_s = 0.0 if self._judge(status) else wait.longer()
            log.warning("reading_process_ended", status=status, restart_in_s=wait_s)
            await asyncio.sleep(wait_s)

    def _judge(self, status: int | str) -> bool:
        """Fail the job that ended the process, if it is known, and let its key rest; otherwise put
        the running jobs on trial. Return False if none was running.
        """
        ran = [(lane, job) for lane, job in enumerate(self._under_way) if job is not None]
        self._under_way = [None for _ in LANES]
        hung, self._hung = self._hung, None
        if hung is None and len(ran) > 1:
            self._on_trial.extend(ran)
            return True
        for lane, job in ran:
            if hung in (None, job):
                job.fail(self._gone(status, largest=lane == len(LANES) - 1))
                self._rest(job.key)
        if not ran:
            return False
        for lane, job in [*self._on_trial, *ran]:
            if not job.done.done():
                self._lanes[lane].again(job)
        self._on_trial.clear()
        return True

    def _rest(self, key: str) -> None:
        rest_s = self._waits.setdefault(key, DoublingWait()).longer()
        self._resting.add(key)
        asyncio.get_running_loop().call_later(rest_s, self._rested, key)
        log.warning("key_rests", key=key, rest_s=rest_s)

    def _rested(self, key: str) -> None:
        self._resting.discard(key)
        for queue in self._lanes:
            queue.wake()

    async def _epoch(self) -> int:
        """Serve with one process until it ends, and return its exit status."""
        async with contextlib.AsyncExitStack() as stack:
            pairs = [socket.socketpair() for _ in LANES]
            process = self._process = self._launch([theirs for _, theirs in pairs])
            stack.callback(self._reap, process)
            channels = [await Channel.over(ours) for ours, _ in pairs]
            for channel in channels:
                stack.callback(channel.close)
            await self._serve(channels)
            process.kill()
            return await asyncio.to_thread(process.wait)

    async def _serve(self, channels: Sequence[Channel]) -> None:
        """Run the jobs on trial one at a time, then those of all lanes, until the process ends or
        hangs.
        """
        while self._on_trial:
            number, job = self._on_trial.popleft()
            if not await self._slice(number, channels[number], job, min(self._hang_s, TRIAL_S)):
                return
        lanes = [asyncio.create_task(self._lane(i, c)) for i, c in enumerate(channels)]
        try:
            await asyncio.wait(lanes, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)

    def _launch(self, sockets: Sequence[socket.socket]) -> subprocess.Popen[bytes]:
        numbers = [side.fileno() for side in sockets]
        try:
            process = subprocess.Popen(
                [*COMMAND, *map(str, numbers)],
                stdin=subprocess.PIPE,
                pass_fds=numbers,
                env=self._environment,
            )
        finally:
            for side in sockets:
                side.close()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(self._hello + b"\n")
            process.stdin.flush()
        return process

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.wait()  # it is dead, so this does not wait
        self._process = None

    async def _lane(self, number: int, channel: Channel) -> None:
        queue = self._lanes[number]
        while await self._slice(number, channel, await queue.next(), self._hang_s):
            pass

    async def _slice(self, number: int, channel: Channel, job: Job, limit_s: float) -> bool:
        """Run the next slice of a job. Return False if the process has ended, or takes longer than
        `limit_s`.
        """
        queue, clock = self._lanes[number], asyncio.get_running_loop().time
        self._under_way[number] = job
        began = clock()
        try:
            async with asyncio.timeout(limit_s):
                await (exchange if job.patience is None else self._patiently)(channel, job)
        except TimeoutError:
            self._hung = job
            return False
        except (OSError, EOFError):
            return False
        self._under_way[number] = None
        if not job.done.done():
            queue.again(job)
        queue.charge(job, clock() - began)
        return True

    async def _patiently(self, channel: Channel, job: Job) -> None:
        """Run the next slice of a job within its patience. `TimeoutError` if it needs more
        processor time; the job has failed.
        """
        assert job.patience is not None
        await exchange(channel, _ready())  # the process may still be starting
        most_s = self._processor_s() + job.patience.seconds
        doing = asyncio.create_task(exchange(channel, job))
        try:
            while not doing.done():
                left_s = most_s - self._processor_s()
                if left_s <= 0:
                    job.fail(job.patience.error())
                    raise TimeoutError
                await asyncio.wait([doing], timeout=left_s + TICK_S)
            await doing
        finally:
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)

    def _processor_s(self) -> float:
        """Return the processor time of the process. The threads of other lanes count, as a library
        may do any lane's work in its own threads.
        """
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) * TICK_S

    def _gone(self, status: int | str, *, largest: bool) -> TltError:
        if largest and status == -signal.SIGABRT:  # how a library in Rust ends without memory
            return TooLarge(
                f"the request needs more than the {self._memory_mb} MiB that the reading process "
                "may use; send it in smaller parts"
            )
        return Unavailable(
            "the process that reads large requests ended while it read this one; send it again",
            retry_after_s=1,
        )


def _ready() -> Job:
    return Job("", [Slice(("ready",), lambda: ())])


def _closed() -> TltError:
    return Unavailable(
        "the server is shutting down and reads no more requests; send this one to another "
        "replica, or later",
        retry_after_s=5,
    )
