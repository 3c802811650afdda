"""Times that the next process can read, on two clocks.

The wall clock may jump, between processes too; the time since boot does not. So a duration is that
of the boot's clock where both times are of one boot, and the wall clock's after another boot.
"""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class KeptTime(NamedTuple):
    wall_s: float
    boot: str  # id of the boot; empty where it is not known
    boot_s: float  # since that boot


def now() -> KeptTime:
    return KeptTime(time.time(), _boot(), time.clock_gettime(time.CLOCK_BOOTTIME))


def elapsed_s(then: KeptTime) -> float:
    """Return the seconds since then, never less than 0."""
    at = now()
    same = then.boot and then.boot == at.boot
    return max(0.0, at.boot_s - then.boot_s if same else at.wall_s - then.wall_s)


@cache
def _boot() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""
