"""Errors for memory, as a user of `tlt drafter` reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tlt_server.errors import StartupError
from tlt_server.trainer.step import memory_errors


@contextmanager
def memory_refused(device: str) -> Iterator[None]:
    """Raise errors for memory as `StartupError` with a remedy. `device`: where the work runs."""
    try:
        with memory_errors():
            yield
    except MemoryError as error:
        remedy = "end what else uses it, or take --device cpu" if device == "cuda" else "free some"
        raise StartupError(
            f"the memory of {device} is too small for target, drafter and states ({error}); "
            f"{remedy}"
        ) from None
