"""The time for which the event loop is held: while one of its turns computes, nothing is answered,
probes included.
"""

from __future__ import annotations

import asyncio
import time
from typing import NoReturn

from tlt_server.metrics import Metrics

EVERY_S = 0.005


async def watch_turns(metrics: Metrics) -> NoReturn:
    """Sample for ever by how much a timer is late. A hold shorter than the interval may be missed,
    and a longer one is counted up to an interval too short.
    """
    longest_s = 0.0
    while True:
        due_s = time.perf_counter() + EVERY_S
        await asyncio.sleep(EVERY_S)
        held_s = max(0.0, time.perf_counter() - due_s)
        metrics.exchanges.loop_held_s.observe(held_s)
        if held_s > longest_s:
            longest_s = held_s
            metrics.exchanges.loop_held_longest_s.set(held_s)
