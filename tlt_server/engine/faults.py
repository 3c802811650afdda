"""Describes an exception that ends the engine: a GPU's error is told apart from a fault of ours.
Imports no torch by itself.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator

# What messages of torch and Triton about a GPU begin with.
MARKS = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]")


def describe(error: BaseException, *, ready: bool) -> str:
    """Return one sentence for clients and operators. `ready`: the engine had been ready, so the
    server starts another one.
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
        if (torch is not None and isinstance(link, torch.AcceleratorError)) or (
            isinstance(link, RuntimeError) and first.startswith(MARKS)
        ):
            return f"the GPU reported {_reported(first)!r}{then}"
    return f"{_named(error)}{then}" if ready else f"{type(error).__name__}: {error}"


def trace(error: BaseException, *, ready: bool) -> str:
    """Return the stack for the log. `ready`: without messages, since they may quote a request."""
    if not ready:
        return "".join(traceback.format_exception(error))
    return "".join(
        part
        for link in reversed([*_chain(error)])
        for part in (*traceback.format_tb(link.__traceback__), f"{_named(link)}\n")
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, and those that it followed."""
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
