"""The machine that this process runs on."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import NamedTuple

MEMORY, CONTROL_GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
# File with a limit -> file with the bytes used, and the count in memory.stat of those that were
# read from files and can be dropped. The second line is version 1 of control groups.
LIMITS = {
    "memory.max": ("memory.current", "inactive_file"),
    "memory/memory.limit_in_bytes": ("memory/memory.usage_in_bytes", "total_inactive_file"),
}


class HostMemory(NamedTuple):
    """Bytes of the machine, or of the control group that limits this process."""

    available: int
    total: int


def processor() -> str:
    """Return the name of the processor, or its architecture where the system does not tell."""
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.machine()


def resident_bytes() -> int:
    """Return the memory that this process has of the host."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGESIZE")


def named_twice(visible: str) -> str:
    """Return the GPU that a value of CUDA_VISIBLE_DEVICES names twice, by number or by UUID, which
    may be cut short; empty: none. CUDA ignores all after an entry that names no GPU.
    """
    seen: list[str] = []
    for entry in (part.strip() for part in visible.split(",")):
        number = re.match(r"\+?\d+", entry)
        name = f"{int(number[0])}," if number else entry.lower()
        if number is None and not name.startswith(("gpu-", "mig-")):
            break
        if any(name.startswith(other) or other.startswith(name) for other in seen):
            return entry
        seen.append(name)
    return ""


def host_memory() -> HostMemory:
    """Return available and total memory: the minimum of the machine and its control group."""
    lines = dict(line.split(":") for line in MEMORY.read_text().splitlines())
    available, total = (int(lines[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    for file, (usage, cache) in LIMITS.items():
        limit = (
            (CONTROL_GROUP / file).read_text().strip() if (CONTROL_GROUP / file).exists() else "max"
        )
        if limit != "max":
            counts = dict(
                line.split()
                for line in (CONTROL_GROUP / usage)
                .with_name("memory.stat")
                .read_text()
                .splitlines()
            )
            used = int((CONTROL_GROUP / usage).read_text()) - int(counts[cache])
            available, total = min(available, max(0, int(limit) - used)), min(total, int(limit))
    return HostMemory(available, total)
