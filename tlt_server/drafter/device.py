"""The device of a `tlt drafter` verb, and its memory errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tlt_server.engine.devices.choice import look
from tlt_server.errors import StartupError
from tlt_server.trainer.learning.step import memory_errors


def device_of(asked: str | None, recorded: str = "") -> str:
    """Return cpu or cuda. `asked`: None chooses a GPU that the kernels support, unless a CPU
    `recorded`. `StartupError` if the requested GPU is unusable.
    """
    if asked == "cpu" or (asked is None and recorded == "cpu"):
        return "cpu"
    unusable = look().unusable
    if asked == "cuda" and unusable:
        raise StartupError(f"--device is cuda, but {unusable}; use --device cpu")
    return "cpu" if unusable else "cuda"


@contextmanager
def memory_refused(device: str) -> Iterator[None]:
    """Raise out-of-memory errors as `StartupError` with a remedy. `device`: where the work runs."""
    try:
        with memory_errors():
            yield
    except MemoryError as error:
        remedy = "end what else uses it, or take --device cpu" if device == "cuda" else "free some"
        raise StartupError(
            f"the memory of {device} is too small for target, drafter and states ({error}); "
            f"{remedy}"
        ) from None
