"""Threads that compute masks of structured outputs and compile grammars while the model runs: the
library releases the GIL. The owner (API key) with the fewest busy threads comes first, and none
gets more than half of them.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

from tlt_server.grammars.compiler import STACK_BYTES

Found = TypeVar("Found")
NICE = 10  # niceness, after that of the model's threads


class _Job(NamedTuple, Generic[Found]):
    work: Callable[[], Found]
    found: Future[Found]


class GrammarThreads:
    def __init__(self, count: int | None = None, *, nice: bool = True) -> None:
        """`count`: threads, at least two; by default half of the cores. `nice`: the model's threads
        have priority.
        """
        self._count = max(2, count or (os.cpu_count() or 1) // 2)
        self._pool = ThreadPoolExecutor(self._count, "grammars", _be_nice if nice else None)
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()  # by owner, next one first
        self.running = Counter[str]()  # by owner

    @property
    def most(self) -> int:
        """Threads that one owner may use."""
        return self._count // 2

    def submit(self, owner: str, work: Callable[[], Found]) -> Future[Found]:
        """Run `work` in a thread when its owner's turn comes, unless its future is cancelled."""
        job = _Job(work, Future[Found]())
        with self._lock:
            self._waiting.setdefault(owner, deque()).append(job)
            self._start()
        return job.found

    def _start(self) -> None:
        """Start the work whose turn has come. Called with the lock held."""
        while self.running.total() < self._count:
            owner = min(self._waiting, key=lambda owner: self.running[owner], default=None)
            if owner is None or self.running[owner] >= self.most:
                return
            jobs = self._waiting[owner]
            job = jobs.popleft()
            if jobs:
                self._waiting.move_to_end(owner)
            else:
                del self._waiting[owner]
            self.running[owner] += 1
            before = threading.stack_size(STACK_BYTES)
            try:
                self._pool.submit(self._run, owner, job)  # may start a thread
            finally:
                threading.stack_size(before)

    def _run(self, owner: str, job: _Job[Found]) -> None:
        try:
            if job.found.set_running_or_notify_cancel():
                job.found.set_result(job.work())
        except BaseException as error:  # a panic of the library, too, is for those who wait
            job.found.set_exception(error)
        finally:
            with self._lock:
                self.running[owner] -= 1
                if not self.running[owner]:
                    del self.running[owner]
                self._start()


def _be_nice() -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
