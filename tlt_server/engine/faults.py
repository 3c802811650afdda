"""Describes an exception that ends the engine: a GPU's error is told apart from a fault of ours.
Imports no torch by itself.
"""

from __future__ import annotations

import sys

# What messages of torch and Triton about a GPU begin with.
MARKS = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]")


def describe(error: BaseException, *, ready: bool) -> str:
    """Return one sentence for clients and operators. `ready`: the engine had been ready, so the
    server starts another one.
    """
    torch = sys.modules.get("torch")
    then = "; the engine restarts" if ready else ""
    link: BaseException | None = error
    while link is not None:  # errors that follow a GPU's error are its consequences
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
        link = link.__cause__ or link.__context__
    return f"{type(error).__name__}: {error}"


def _reported(first: str) -> str:
    for mark in MARKS:
        first = first.removeprefix(f"{mark}: ")
    return first
