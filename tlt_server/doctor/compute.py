"""Checks of torch, a GPU, and the compiler of the CPU kernels. Run in the child process."""

from __future__ import annotations

import os
import re
import shutil
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from tlt_server.doctor.checks import Finding, fail, ok, warn

DRIVER = Path("/proc/driver/nvidia/version")


def torch_import() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library of it cannot be loaded
        return fail(
            f"torch cannot be imported: {type(error).__name__}: {error}",
            "pip install --force-reinstall torch",
        )
    capability = torch.backends.cpu.get_cpu_capability()
    found = f"{torch.__version__}, {capability}"
    if capability == "DEFAULT":
        return warn(
            found,
            "torch knows no vector instructions of this processor; use one with AVX2 or AVX-512",
        )
    return ok(found)


def gpu() -> Finding:
    from tlt_server.engine.devices import choice  # imports torch, which may be what is wrong

    found, driver = choice.look(), _driver()
    if found.twice:
        return warn(
            f"{found.unusable}: only --device cpu starts",
            "name each GPU once in CUDA_VISIBLE_DEVICES",
        )
    if not (found.name or driver):
        return ok("none")
    if found.unusable:
        return warn(
            f"driver {driver or 'unknown'}, but {found.unusable}: --device auto computes on the "
            "CPU",
            "install a CUDA build of torch that this driver supports, and Triton; or say --device "
            "cpu",
        )
    import torch

    from tlt_server.attention import GPU_BACKENDS

    backends = [name for name in GPU_BACKENDS if name != "flash_attn" or find_spec(name)]
    about = (
        f"{found.description}, {found.free_bytes // choice.MIB} MiB free; "
        f"driver {driver or 'unknown'}, torch for CUDA {torch.version.cuda}, "
        f"Triton {_version('triton')}; attention {', '.join(backends)}; {_kept_starts()}"
    )
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return warn(
            f"{about}; no C compiler",
            "install gcc: Triton needs one for kernels that are not in its cache yet",
        )
    return ok(about)


def _kept_starts() -> str:
    from tlt_server.engine.gpu.start.kernel_records import cache_directory, records, toolchain

    cache, own = cache_directory(), toolchain()
    kept = sum(each.toolchain == own and each.complete(cache) for each in records(cache))
    if kept:
        return f"Triton's cache {cache} has the kernels of {kept} starts"
    return f"Triton's cache {cache} has no start's kernels yet: the first one compiles them"


def _driver() -> str:
    """Return the version of the loaded NVIDIA driver; empty without one."""
    if not DRIVER.exists():
        return ""
    version = re.search(r"\d+\.\d+(\.\d+)?", DRIVER.read_text())
    return version[0] if version else "unknown"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


def kernels() -> Finding:
    import numba

    from tlt_kernels.cpu.compiled import cache_directory, kernels

    if numba.njit(lambda x: x + 1)(1) != 2:
        return fail(
            f"numba {numba.__version__} compiles wrongly",
            "pip install --force-reinstall numba llvmlite",
        )
    compiles = f"numba {numba.__version__} compiles"
    try:
        needed = kernels()
    except (ImportError, OSError):  # torch, which has a check of its own
        return ok(compiles)
    missing, cache = sum(not each.cached for each in needed), cache_directory()
    if missing:
        return ok(
            f"{compiles}; {missing} of {len(needed)} kernels are not in its cache {cache} yet: the "
            "first start on a CPU compiles them, once per machine, in about 20 s of an idle core"
        )
    return ok(f"{compiles}; all kernels are in its cache {cache}")
