"""NVIDIA's Multi-Process Service (MPS): the driver's word on whether this process shares a GPU
through it, and the variables that give a process its part of that GPU. Imports no torch.

The driver is asked, not the directory of the control daemon: a daemon may run that this process has
not reached, as one of another user or of another CUDA_MPS_PIPE_DIRECTORY.
"""

from __future__ import annotations

import ctypes
import os

MPS_ENABLED = 133  # CU_DEVICE_ATTRIBUTE_MPS_ENABLED: contexts made on the device are shared by MPS
BELOW_NORMAL = "1"  # a client's priority; the others have 0
DIRECTORY = "/tmp/nvidia-mps"  # the driver's own default of CUDA_MPS_PIPE_DIRECTORY


def mps_enabled() -> bool:
    """Return True if this process is a client of MPS on its first GPU. False where the driver does
    not know, or there is none.
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
    """Return where the driver looks for the control daemon."""
    return os.environ.get("CUDA_MPS_PIPE_DIRECTORY", DIRECTORY)


def client_environment(percent: int) -> dict[str, str]:
    """Return the variables of a client that has less of the GPU than others. `percent`: of its
    multiprocessors.
    """
    return {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent),
        "CUDA_MPS_CLIENT_PRIORITY": BELOW_NORMAL,
    }
