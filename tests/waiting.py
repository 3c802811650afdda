"""Waits for what other processes and threads do."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)
