"""Environment variables that torch's libraries read once, when they are loaded. Imports no torch.

A parent process sets them before it starts the engine, a test before the first `import torch`.
"""

from __future__ import annotations

import os
from pathlib import Path

# NVLink multicast can take a host's GPUs out of service.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def library_environment(numerics: str = "strict") -> dict[str, str]:
    """Return the variables to set before torch is imported.

    Waiting OpenMP workers sleep instead of spinning: if the cores are shared with a frontend and a
    client, a spinning worker keeps the worker that it waits for off the core (measured 15 to 27
    times slower on two busy cores).

    For every connection of a process group, torch asks the name server for the peer's name and
    continues without one: a server that lost one query in 25 delayed one join in 20 by the
    resolver's 5 s. So it waits for one second, at most twice.

    torch's own groups over NCCL end the process if a broadcast does not arrive in time, unless told
    not to; a trainer's death must not end the server.

    No network switch may add numbers or multicast to several GPUs: the library, not this project,
    would choose the order of addition.
    """
    waiting = {
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
        **NO_MULTICAST,
        "RES_OPTIONS": os.environ.get("RES_OPTIONS", "timeout:1 attempts:2"),
    }
    return {**waiting, **(strict_environment() if numerics == "strict" else {})}


def strict_environment(cpuinfo: str | None = None) -> dict[str, str]:
    """Return the variables that make MKL's float32 matmuls row-invariant, by the text of
    /proc/cpuinfo.

    Empty if no fixed-order mode is known (no AVX2: ARM, old x86). `Numerics` tests whether the mode
    works, and uses another method if not.
    """
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text()
        except OSError:
            return {}
    flags = next(
        (set(line.split()) for line in cpuinfo.splitlines() if line.startswith("flags")), set()
    )
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags:
        return {"MKL_CBWR": "AVX512,STRICT"}
    if "avx2" in flags:
        return {"MKL_CBWR": "AVX2,STRICT"}
    return {}
