"""Exceptions that are not a user's error: fatal ones, described for clients and operators, and
contained ones, which concern one command, one sequence or one figure. Also describes how a child
process ended. Imports no torch by itself.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

from tlt_server.errors import EngineFailed, TltError

# What messages of torch and Triton about a GPU begin with.
MARKS = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]")


class Containment:
    """Handles exceptions in the handling of one command, sequence or figure: logs and counts each,
    so that its caller ends only what it concerns.
    """

    total: ClassVar[int] = 0  # in this process; no test may add to it unless it says so

    def __init__(
        self,
        check: Callable[[], None] = lambda: None,
        ends: tuple[type[Exception], ...] = (),
        log: Callable[[str, str], None] = lambda what, trace: print(
            f"tlt: contained_fault in {what}\n{trace}", end="", file=sys.stderr
        ),
    ) -> None:
        """`check`: asserts the invariants after a fault. `ends`: exceptions that are not contained.
        `log`: gets the failed operation and the stack.
        """
        self.count = 0
        self._check, self._ends, self._log = check, ends, log

    def contain(self, error: Exception, what: str) -> EngineFailed:
        """Return the error for the requests or commands that this fault ends. Raise `error` again
        if it comes from a GPU or is one of `ends`; raise `AssertionError` if the check fails.
        """
        if isinstance(error, self._ends) or of_gpu(error):
            raise error
        self.count += 1
        Containment.total += 1
        self._log(what, trace(error, ready=True))
        try:
            self._check()
        except AssertionError as broken:
            raise broken from error
        return EngineFailed(
            f"a fault of the server, {_named(error)}, ended this and nothing else; report it with "
            "the server's log"
        )

    def typed(self, error: Exception, what: str) -> TltError:
        """Return a user's error unchanged, and contain any other."""
        if isinstance(error, TltError) and not isinstance(error, self._ends):
            return error
        return self.contain(error, what)

    @contextmanager
    def containing(self, what: str) -> Iterator[None]:
        """Contain the block's errors: at most a figure, or a part of an event, is lost."""
        try:
            yield
        except Exception as error:
            self.contain(error, what)


def describe(error: BaseException, *, ready: bool) -> str:
    """Return one sentence for clients and operators. `ready`: the engine was ready, so the server
    starts another one.
    """
    torch = sys.modules.get("torch")
    then = "; the engine restarts" if ready else ""
    for link in _chain(error):  # errors that follow a GPU's error are its consequences
        first = (str(link).splitlines() or [""])[0]
        if torch is not None and isinstance(link, torch.OutOfMemoryError):
            return (
                f"the GPU ran out of memory: {first}{then}; lower memory_fraction, max_running or "
                "max_rows if it happens again"
            )
        if _is_of_gpu(link):
            return f"the GPU reported {_reported(first)!r}{then}"
    return f"{_named(error)}{then}" if ready else f"{type(error).__name__}: {error}"


def trace(error: BaseException, *, ready: bool) -> str:
    """Return the stack for the log. `ready`: omit messages, since they may quote a request."""
    if not ready:
        return "".join(traceback.format_exception(error))
    return "".join(
        part
        for link in reversed([*_chain(error)])
        for part in (*traceback.format_tb(link.__traceback__), f"{_named(link)}\n")
    )


def of_gpu(error: BaseException) -> bool:
    """Return True if the error, or one that caused it, is a GPU's."""
    return any(_is_of_gpu(link) for link in _chain(error))


def _is_of_gpu(link: BaseException) -> bool:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(link, torch.OutOfMemoryError | torch.AcceleratorError):
        return True
    return isinstance(link, RuntimeError) and str(link).startswith(MARKS)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def _named(error: BaseException) -> str:
    """Name an error by its type and place."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"


def _reported(first: str) -> str:
    for mark in MARKS:
        first = first.removeprefix(f"{mark}: ")
    return first


def exit_of(status: int) -> str:
    """Return how a process ended: its status or signal."""
    if status >= 0:
        return f"ended with status {status}"
    named = {each.value: each.name for each in signal.Signals}
    return f"was ended by {named.get(-status, f'signal {-status}')}"
