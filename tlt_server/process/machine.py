"""The machine that this process runs on: its processor and memory, and whether it shares a GPU by
NVIDIA's Multi-Process Service (MPS). Imports no torch.
"""

from __future__ import annotations

import ctypes
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
    """Return the name of the processor, or its architecture if the system does not report the
    name.
    """
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.machine()


def resident_bytes() -> int:
    """Return the bytes of host memory that this process uses."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGESIZE")


def named_twice(visible: str) -> str:
    """Return the GPU that a value of CUDA_VISIBLE_DEVICES names twice, by number or by a UUID,
    perhaps abbreviated; empty if none. CUDA ignores everything after an invalid entry.
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


def visible_gpus() -> list[str]:
    """Return the GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them. Makes no
    context.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    named = [entry.strip() for entry in listed if entry.strip()]
    return named[: count.value] or [str(index) for index in range(count.value)]


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


MPS_ENABLED = 133  # CU_DEVICE_ATTRIBUTE_MPS_ENABLED: contexts made on the device are shared by MPS
BELOW_NORMAL = "1"  # a client's priority; the others have 0
DIRECTORY = "/tmp/nvidia-mps"  # the driver's own default of CUDA_MPS_PIPE_DIRECTORY


def mps_enabled() -> bool:
    """Return True if this process is a client of MPS on its first GPU. False if the driver does not
    know, or there is none.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    device, enabled = ctypes.c_int(), ctypes.c_int()
    return (
        driver.cuInit(0) == 0
        and driver.cuDeviceGet(ctypes.byref(device), 0) == 0
        and driver.cuDeviceGetAttribute(ctypes.byref(enabled), MPS_ENABLED, device) == 0
        and enabled.value == 1
    )


def pipe_directory() -> str:
    """Return the directory in which the driver looks for the control daemon."""
    return os.environ.get("CUDA_MPS_PIPE_DIRECTORY", DIRECTORY)


def client_environment(percent: int) -> dict[str, str]:
    """Return the variables of a client with a limited share of the GPU. `percent`: of its
    multiprocessors.
    """
    return {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent),
        "CUDA_MPS_CLIENT_PRIORITY": BELOW_NORMAL,
    }
