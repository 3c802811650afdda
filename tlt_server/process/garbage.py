"""Garbage collection for an event loop that must not wait, and none while libraries load.

A full collection visits every tracked object, so it would hold the loop for 50 ms while thousands
of sequences are open. Almost everything is freed without it, by reference counts, and young cycles
by the younger generations, as usual. So the oldest generation is collected only while it has few
objects, or when cycles have made it so large that memory matters more.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

EVERY_S = 1.0
FEW = 10_000  # objects; on a slow core visiting them takes 5 ms
MANY = 1_000_000  # objects, of some 100 bytes each; 4,096 open sequences have about 60,000
RENEWED = 10  # collections of the middle generation after which the oldest has much that is new
NEVER = 2**31 - 1


@contextmanager
def loading() -> Iterator[None]:
    """Disable the collector while libraries are imported: it finds nothing and takes a fifth of
    that time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


async def collect_while_few() -> NoReturn:
    """Collect the oldest generation here instead of at allocations. The caller excludes loaded
    objects with `gc.freeze`.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], NEVER)
    try:
        while True:
            await asyncio.sleep(EVERY_S)
            look()
    finally:
        gc.set_threshold(*thresholds)


def look() -> None:
    """Collect the oldest generation if it has new objects, and few or too many in all."""
    if gc.get_count()[2] < RENEWED:
        return
    objects = len(gc.get_objects(generation=2))
    if objects <= FEW or objects >= MANY:
        gc.collect()
