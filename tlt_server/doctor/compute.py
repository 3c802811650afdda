"""Checks of what computes: torch, a GPU, the compiler of the CPU kernels. Run in the child process."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from tlt_server.doctor.finding import Finding, fail, ok, warn

DRIVER = Path("/proc/driver/nvidia/version")


def torch_import() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library of it cannot be loaded
        return fail(f"torch cannot be imported: {type(error).__name__}: {error}", "pip install --force-reinstall torch")
    capability = torch.backends.cpu.get_cpu_capability()
    found = f"{torch.__version__}, {capability}"
    if capability == "DEFAULT":
        return warn(found, "torch knows no vector instructions of this processor; use one with AVX2 or AVX-512")
    return ok(found)


def gpu() -> Finding:
    import torch

    driver, built = DRIVER.exists(), torch.version.cuda
    if not driver:
        return ok("none: the engine computes on the CPU")
    if not torch.cuda.is_available():
        return warn(f"a driver is loaded, but this torch ({'built for CUDA ' + built if built else 'CPU-only'}) sees no device",
                    "to use it later, install a CUDA build of torch that this driver supports; this version computes on the CPU")
    triton = "with" if find_spec("triton") else "without"
    return ok(f"{torch.cuda.get_device_name()} (CUDA {built}, {triton} Triton), left alone: this version computes on the CPU")


def kernels() -> Finding:
    import numba

    import tlt_kernels.cpu.sampling  # noqa: F401 (its import is the check)

    if numba.njit(lambda x: x + 1)(1) != 2:
        return fail(f"numba {numba.__version__} compiles wrongly", "pip install --force-reinstall numba llvmlite")
    return ok(f"numba {numba.__version__} compiles")
