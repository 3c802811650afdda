"""An event loop whose time jumps to its next timer, so that minutes of a fleet take a moment."""

from __future__ import annotations

import asyncio
import logging
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from unittest import mock

import structlog

T = TypeVar("T")


class _Jump(selectors.SelectSelector):
    """Waits for no socket: the time of a wait passes at once."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing is left to happen, and the simulation has not ended")
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now_s

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run it at once, since no time may pass in another thread."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def simulate(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time, which `time.monotonic` follows, and return its result. What
    it logs is dropped.
    """
    loop, configured = VirtualLoop(), structlog.get_config()
    silent = structlog.make_filtering_bound_logger(logging.CRITICAL)
    structlog.configure(wrapper_class=silent)
    try:
        with mock.patch.object(time, "monotonic", loop.time):
            try:
                return loop.run_until_complete(work)
            finally:
                left = asyncio.all_tasks(loop)
                for task in left:
                    task.cancel()
                if left:
                    loop.run_until_complete(asyncio.wait(left))
    finally:
        structlog.configure(**configured)
        loop.close()
