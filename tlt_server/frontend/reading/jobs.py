"""Jobs that wait for the reading process, served in turns of the keys that ask.

A job consists of slices, each one request to the process. Keys share its time, which is charged by
slice, so a key with many or large jobs gets the share of one key. A job whose client has left is
dropped before its next slice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from tlt_server.errors import QueueFull, TltError
from tlt_server.frontend.reading.frames import Builder, Channel
from tlt_server.process.turns import Turns

MAX_WAITING = 1024  # jobs of all keys
MAX_WAITING_KEY = 256  # jobs of one key
QUANTUM_S = 0.05  # time of the process that a key gets in one round


class Slice(NamedTuple):
    """One request to the process."""

    header: Sequence[Any]  # name of the job, then its arguments
    payload: Callable[[], Iterable[bytes]]  # makes the frames after the header


class Patience(NamedTuple):
    """A limit on the work of a slice, and the error for exceeding it."""

    seconds: float  # processor time of all lanes, so the load of other programs refuses nothing
    error: Callable[[], Exception]


class Job:
    """One piece of work: its slices, and the returned values."""

    def __init__(self, key: str, slices: Iterable[Slice], patience: Patience | None = None) -> None:
        """`patience`: a limit on each slice's work, if there is one."""
        self.key, self.values, self.patience = key, list[Any](), patience
        self.done: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._slices: Iterator[Slice] = iter(slices)
        self.slice = next(self._slices, None)  # the one that is next, or under way

    def take(self, value: Any) -> None:
        """Add the value of a slice."""
        self.values.append(value)
        self.slice = next(self._slices, None)
        if self.slice is None and not self.done.done():
            self.done.set_result(self.values)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class JobQueue:
    """The waiting jobs of one lane. Jobs of keys in `resting` stay in it."""

    def __init__(self, resting: Container[str] = ()) -> None:
        self._resting = resting  # call `wake` after taking a key out
        self._jobs: dict[str, deque[Job]] = {}  # by key
        self._turns = Turns(QUANTUM_S)
        self._some = asyncio.Event()

    def __len__(self) -> int:
        return sum(map(len, self._jobs.values()))

    def add(self, job: Job) -> None:
        """Queue a job. `QueueFull` if too many are waiting."""
        mine = len(self._jobs.get(job.key, ()))
        for count, limit, whose in (
            (mine, MAX_WAITING_KEY, "of this key "),
            (len(self), MAX_WAITING, ""),
        ):
            if count >= limit:
                raise QueueFull(
                    f"{count} large requests {whose}wait to be read; the limit is {limit}: send "
                    "fewer at once, or again later",
                    retry_after_s=1,
                )
        self.again(job)

    def again(self, job: Job) -> None:
        """Queue a job again for its further slices."""
        self._jobs.setdefault(job.key, deque()).append(job)
        self._turns.wait(job.key)
        self.wake()

    def wake(self) -> None:
        """Check again for a runnable job."""
        self._some.set()

    async def next(self) -> Job:
        """Return the job whose slice is next."""
        while True:
            while (key := self._key()) is None:
                self._some.clear()
                await self._some.wait()
            job = self._jobs[key].popleft()
            if not self._jobs[key]:
                del self._jobs[key]
                self._turns.leave(key)
            if not job.done.done():
                return job

    def _key(self) -> str | None:
        return next((key for key in self._turns.order() if key not in self._resting), None)

    def charge(self, job: Job, seconds: float) -> None:
        """Charge a job's key for the time of a slice."""
        self._turns.charge(job.key, seconds)

    def end(self, error: Callable[[], Exception]) -> None:
        """End every waiting job with an error."""
        for key, jobs in self._jobs.items():
            for job in jobs:
                job.fail(error())
            self._turns.leave(key)
        self._jobs.clear()


async def exchange(channel: Channel, job: Job) -> None:
    """Run the next slice of a job."""
    assert job.slice is not None
    header, payload = job.slice
    error: TltError | None = None
    try:
        await channel.send(chain([msgspec.msgpack.encode(header)], payload()))
    except TltError as refused:  # the payload cannot be sent; the process answers to what it got
        error = refused
        await channel.send(())
    builder = Builder()
    while piece := await channel.receive():
        if error is None and not job.done.done():
            try:
                builder.take(piece)
            except TltError as answered:
                error = answered
    if error is not None:
        job.fail(error)
    elif not job.done.done():
        job.take(builder.value)
