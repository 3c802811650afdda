"""Waits for what other processes and threads do."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], within_s: float = 240.0) -> None:
    """Look less often the longer it takes: what is asked may cost a server some milliseconds."""
    begun_s = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - begun_s
        assert waited_s < within_s, "it did not happen"
        time.sleep(min(max(0.01, waited_s / 20), 0.1))
