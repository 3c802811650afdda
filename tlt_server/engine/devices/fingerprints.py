"""The fingerprint of each kind of device."""

from __future__ import annotations

import os
import platform

import torch
from llvmlite.binding import get_host_cpu_name

from tlt_kernels import versions
from tlt_server.engine.settings import DecidedSettings
from tlt_server.models.numerics import Numerics
from tlt_server.wire.fingerprint import Fingerprint

GPU_PROMISES = {  # by numerics
    "fast": "fast: library matmuls as they come; exact in distribution, not bit for bit",
    "strict": "strict: kernels that add in an order fixed by the weights' shapes and absolute "
    "positions",
}


def of_cpu(settings: DecidedSettings, numerics: Numerics) -> Fingerprint:
    """Return the fingerprint after the self-test, which chooses the library. Kernels are compiled
    for a processor, whose vectors are the order in which their loops add.
    """
    processor = os.environ.get("NUMBA_CPU_NAME") or get_host_cpu_name()
    library = f"MKL_CBWR {os.environ.get('MKL_CBWR', 'unset')}"
    architecture = f"{platform.machine()} {processor}, {library}"
    how = f"{numerics.mode} {versions.CPU}: {numerics.method.name}"
    return Fingerprint(
        settings.reduction_leaves, settings.dtype, architecture, how, settings.attention
    )


def of_gpu(settings: DecidedSettings, device: torch.device) -> Fingerprint:
    """`device`: a CPU where Triton's interpreter computes."""
    architecture = "interpreter"
    if device.type == "cuda":
        architecture = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    how = f"{settings.numerics} {versions.GPU}"
    return Fingerprint(
        settings.reduction_leaves, settings.dtype, architecture, how, settings.attention
    )
