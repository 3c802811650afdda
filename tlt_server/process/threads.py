"""Threads for a loop that must not wait. A thread that cannot be started, or exceeds the limit, is
a typed error for the caller.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from tlt_server.errors import Unavailable


def prepare_grpc() -> None:
    """Keep gRPC's threads out of a fork that is not yet another program, where they crash, and its
    notes about connections out of the log. The caller has not imported gRPC yet.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def started(name: str, work: Callable[[], None]) -> threading.Thread:
    """Start a thread. `Unavailable` if the system refuses one."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        raise Unavailable(
            f"no thread can be started to {name} ({error}); raise the limit on processes (ulimit "
            "-u, or the container's pids limit), or ask again later"
        ) from None
    return thread


class Crew:
    """Threads that do one kind of work, at most `limit` at once."""

    def __init__(self, name: str, limit: int) -> None:
        self._name, self._limit = name, limit
        self._threads: list[threading.Thread] = []

    @property
    def busy(self) -> bool:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return bool(self._threads)

    def check_room(self, waiting: int = 0) -> None:
        """Raise `Unavailable` if running and waiting threads together reach the limit."""
        count = (len(self._threads) if self.busy else 0) + waiting
        if count >= self._limit:
            raise Unavailable(
                f"{count} calls to {self._name} run or wait already, the limit is {self._limit}; "
                "wait for one to be answered, then ask again"
            )

    def start(self, work: Callable[[], None]) -> None:
        self._threads.append(started(self._name, work))


class Errands:
    """One thread that runs its tasks in order. It is started in advance, because a start takes
    longer than a loop may wait. It ends with its owner.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        started(name, partial(_run, self._queue))
        weakref.finalize(self, self._queue.put, None)

    def give(self, errand: Callable[[], None]) -> None:
        self._queue.put(errand)

    def mark(self) -> threading.Event:
        """Return an event that is set once all tasks given so far are done."""
        done = threading.Event()
        self._queue.put(done.set)
        return done


def _run(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (errand := queue.get()) is not None:
        try:
            errand()
        except Exception:  # the next errand runs nevertheless
            with contextlib.suppress(Exception):
                traceback.print_exc()
        del errand  # free what it holds before the next one comes
