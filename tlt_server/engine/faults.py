"""What is said of an exception that ends the engine: a GPU's error is told apart from a fault of ours. Imports no torch by itself."""

from __future__ import annotations

import sys

MARKS = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]", "CUBLAS", "cuBLAS")


def told(error: BaseException, *, ready: bool) -> str:
    """One sentence for clients and operators. `ready`: the engine had been, so another one follows."""
    kind, first = _kind(error), (str(error).splitlines() or [""])[0]
    then = "; the engine restarts" if ready else ""
    if kind == "memory":
        lower = "lower memory_fraction, max_running or max_rows, or end what else uses this GPU"
        return f"the GPU ran out of memory: {first}{then}: {lower}" if ready else f"the GPU ran out of memory: {first}; {lower}"
    if kind == "gpu":
        return f"the GPU reported {_reported(first)!r}{then}"
    return f"{type(error).__name__}: {error}"


def _kind(error: BaseException) -> str:
    """gpu | memory | other; the errors behind it count, too."""
    torch = sys.modules.get("torch")
    chain: BaseException | None = error
    while chain is not None:
        if torch is not None and isinstance(chain, torch.OutOfMemoryError):
            return "memory"
        if torch is not None and isinstance(chain, torch.AcceleratorError):
            return "gpu"
        if isinstance(chain, RuntimeError) and str(chain).startswith(MARKS):
            return "gpu"
        chain = chain.__cause__ or chain.__context__
    return "other"


def _reported(first: str) -> str:
    for mark in ("CUDA error: ", "CUDA driver error: ", "Triton Error [CUDA]: "):
        first = first.removeprefix(mark)
    return first
