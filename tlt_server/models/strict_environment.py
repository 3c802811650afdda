"""The environment that makes the matrix library's float32 products row-invariant. Imports no torch.

The library reads it once, when it is loaded: a parent process sets it before it starts the engine, a test before the
first `import torch`.
"""

from __future__ import annotations

from pathlib import Path


def strict_environment(cpuinfo: str | None = None) -> dict[str, str]:
    """Variables to set before torch is imported. `cpuinfo` is the text of /proc/cpuinfo (read when None).

    Empty where no fixed-order mode is known (no AVX2: ARM, old x86); `Numerics` then falls back to padded blocks.
    """
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text()
        except OSError:
            return {}
    flags = next((set(line.split()) for line in cpuinfo.splitlines() if line.startswith("flags")), set())
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags:
        return {"MKL_CBWR": "AVX512,STRICT"}
    if "avx2" in flags:
        return {"MKL_CBWR": "AVX2,STRICT"}
    return {}
