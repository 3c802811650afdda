"""The time that a server's loop is held: the processor time of its longest pass, which does not
depend on the load of the machine.
"""

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.frontend.live_server import LiveServer
from tlt_server.process.garbage import NEVER


class LoopHolds:
    def __init__(self) -> None:
        self.longest_s = 0.0
        self._since_s: float | None = None
        self._over = False

    def watch(self) -> None:
        """Count a pass, in each pass of the loop."""
        now_s = time.thread_time()
        if self._since_s is not None:
            self.longest_s = max(self.longest_s, now_s - self._since_s)
        self._since_s = now_s
        if not self._over:
            asyncio.get_running_loop().call_soon(self.watch)

    def stop(self) -> None:
        self._over = True


@contextmanager
def loop_holds(server: LiveServer) -> Iterator[LoopHolds]:
    """Watch the loop. What the tests hold is kept from this garbage collection and all later ones,
    as the server does with what it has loaded, and nothing but `garbage` collects the oldest
    generation.
    """
    holds, thresholds = LoopHolds(), gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds[:2], NEVER)
    server.call(holds.watch)
    try:
        yield holds
    finally:
        server.call(holds.stop)
        gc.set_threshold(*thresholds)
