"""CUDA calls that torch does not offer, by ctypes: memory shared between processes, and host memory
that GPUs can access.

A failing call raises `RuntimeError` with its name. The library is the one that torch has loaded.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag there is


class Handle(ctypes.Structure):
    """The struct cudaIpcMemHandle_t, passed by value."""

    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class Range(NamedTuple):
    """A range of `size` addresses from `base` on."""

    base: int
    size: int

    def holds(self, other: Range) -> bool:
        return self.base <= other.base and other.base + other.size <= self.base + self.size


def allocated(size: int) -> int:
    """Allocate memory of the current GPU by the driver, so that nothing else shares its block."""
    pointer = ctypes.c_void_p()
    _call("cudaMalloc", ctypes.byref(pointer), size)
    assert pointer.value is not None
    return pointer.value


def free(pointer: int) -> None:
    _call("cudaFree", pointer)


def handle_of(pointer: int) -> bytes:
    handle = Handle()
    _call("cudaIpcGetMemHandle", ctypes.byref(handle), pointer)
    return bytes(handle)


def opened(handle: bytes) -> int:
    """Map another process's allocation on the current GPU."""
    pointer = ctypes.c_void_p()
    _call(
        "cudaIpcOpenMemHandle",
        ctypes.byref(pointer),
        Handle.from_buffer_copy(handle),
        LAZY_PEER_ACCESS,
    )
    assert pointer.value is not None
    return pointer.value


def close(pointer: int) -> None:
    _call("cudaIpcCloseMemHandle", pointer)


def allocation(pointer: int) -> Range:
    """Return the whole allocation that holds the address, by the current GPU's driver."""
    base, size = ctypes.c_void_p(), ctypes.c_size_t()
    error = _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), pointer)
    if error:
        raise RuntimeError(f"cuMemGetAddressRange failed ({error})")
    return Range(base.value or 0, size.value)


def pin(pointer: int, size: int) -> None:
    """Pin pages of the host, so that GPUs copy from and to them directly."""
    _call("cudaHostRegister", pointer, size, 0)


def unpin(pointer: int) -> None:
    _call("cudaHostUnregister", pointer)


def _call(name: str, *arguments: Any) -> None:
    error = getattr(_runtime(), name)(*arguments)
    if error:
        _runtime().cudaGetLastError()  # clears it, so that the next call does not report it
        raise RuntimeError(f"{name} failed ({_runtime().cudaGetErrorString(error).decode()})")


@cache
def _runtime() -> ctypes.CDLL:
    """Return the CUDA runtime by the name that torch is linked with."""
    import torch

    version = str(torch.version.cuda)
    try:
        library = ctypes.CDLL(f"libcudart.so.{version.split('.')[0]}")
    except OSError as error:
        raise RuntimeError(
            f"there is no CUDA runtime of torch's version ({version}) here: {error}"
        ) from None
    address = ctypes.POINTER(ctypes.c_void_p)
    library.cudaMalloc.argtypes = [address, ctypes.c_size_t]
    library.cudaFree.argtypes = [ctypes.c_void_p]
    library.cudaIpcGetMemHandle.argtypes = [ctypes.POINTER(Handle), ctypes.c_void_p]
    library.cudaIpcOpenMemHandle.argtypes = [address, Handle, ctypes.c_uint]
    library.cudaIpcCloseMemHandle.argtypes = [ctypes.c_void_p]
    library.cudaHostRegister.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
    library.cudaHostUnregister.argtypes = [ctypes.c_void_p]
    library.cudaGetErrorString.argtypes, library.cudaGetErrorString.restype = (
        [ctypes.c_int],
        ctypes.c_char_p,
    )
    return library


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuMemGetAddressRange_v2.argtypes = [
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.c_void_p,
    ]
    return library
