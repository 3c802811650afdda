"""The machine that this process runs on."""

from __future__ import annotations

import platform
import re
from pathlib import Path


def processor() -> str:
    """Return the name of the processor, or its architecture where the system does not tell."""
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.machine()
