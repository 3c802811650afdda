"""Waits for what other processes and threads do, and a clock that waits for nothing."""

from __future__ import annotations

import asyncio
import inspect
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def until(condition: Callable[[], object], within_s: float = 240.0) -> None:
    """Look less often the longer it takes: what is asked may cost a server some milliseconds."""
    begun_s = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - begun_s
        assert waited_s < within_s, "it did not happen"
        time.sleep(min(max(0.01, waited_s / 20), 0.1))


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test that is a coroutine in an event loop of its own."""

    @wraps(test)
    def run(**given: Any) -> None:
        asyncio.run(test(**given))

    return run


def in_loop_with(
    opened: Callable[[Path], AbstractContextManager[dict[str, Any]]], *names: str
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Run a test that is a coroutine in an event loop of its own. It gets the named arguments,
    which are opened for the fixture `model`, and fixtures.
    """

    def decorated(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        asked = inspect.signature(test).parameters

        @wraps(test)
        def run(model: Path, **given: Any) -> None:
            async def main() -> None:
                with opened(model) as arguments:
                    arguments |= given | ({"model": model} if "model" in asked else {})
                    await test(**arguments)

            asyncio.run(main())

        fixtures = [asked[name] for name in asked if name not in (*names, "model")]
        model = inspect.Parameter("model", inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = inspect.Signature([*fixtures, model])  # type: ignore[attr-defined]
        return run

    return decorated


def meanwhile(call: Callable[[], T]) -> Future[T]:
    """Call in a thread that ends no test; the result is had from the future."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class Jumping(selectors.DefaultSelector):
    """Nothing comes from outside: a loop that has nothing to do but to wait goes on at once, that
    much later by its clock.
    """

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now_s += timeout or 0.0
        return super().select(0)


def timed(story: Coroutine[Any, Any, T]) -> T:
    """Run it by a clock of its own, so that however long the machine takes is none of its time."""

    def made() -> asyncio.AbstractEventLoop:
        selector = Jumping()
        loop = asyncio.SelectorEventLoop(selector)
        loop.time = lambda: selector.now_s  # type: ignore[method-assign]
        return loop

    with asyncio.Runner(loop_factory=made) as runner:
        return runner.run(story)
