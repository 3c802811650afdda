"""The environment that torch's libraries read once, when they are loaded. Imports no torch.

A parent process sets it before it starts the engine, a test before the first `import torch`.
"""

from __future__ import annotations

import os
from pathlib import Path

# NVLink multicast can take a host's GPUs out of service.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def library_environment(numerics: str = "strict") -> dict[str, str]:
    """Variables to set before torch is imported.

    Waiting OpenMP workers sleep instead of spinning: where the cores are shared with a frontend and
    a client, a spinning worker keeps the one it waits for off the core (measured 15 to 27 times
    slower on two busy cores).

    For every connection of a process group torch asks the name server for the peer's name, and goes
    on without one: a server that loses one question in 25 held up one join in 20 for the resolver's
    5 s. So it waits for a second, twice at most.

    torch's own groups over NCCL end the process where a broadcast does not come in time, unless
    they are told not to: a trainer that dies is no reason for that.

    No switch of a network adds numbers, nor sends them to several GPUs at once: an order of
    addition that the library chooses is not ours.
    """
    waiting = {
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
        **NO_MULTICAST,
        "RES_OPTIONS": os.environ.get("RES_OPTIONS", "timeout:1 attempts:2"),
    }
    return {**waiting, **(strict_environment() if numerics == "strict" else {})}


def strict_environment(cpuinfo: str | None = None) -> dict[str, str]:
    """Return what makes MKL's float32 matmuls row-invariant, by the text of /proc/cpuinfo.

    Empty where no fixed-order mode is known (no AVX2: ARM, old x86). `Numerics` tests whether it
    holds, and takes another method where it does not.
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
