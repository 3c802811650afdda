"""A limit on the time of Python code that is not ours, in one thread."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class OutOfTime(Exception):
    """The code has run for too long."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` at the next line that this thread comes to after the time is up."""
    end = time.monotonic() + seconds

    def trace(frame: FrameType, event: str, value: Any) -> Any:
        if time.monotonic() > end:
            raise OutOfTime(f"it takes more than {seconds:g} s")
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
