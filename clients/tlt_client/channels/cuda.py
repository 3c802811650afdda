"""The few calls of CUDA that torch does not make for us, by ctypes: memory that processes share,
memory of the host that GPUs reach.

What fails is a `RuntimeError` with the call's name; the library is the one that torch has loaded
already.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag there is


class Handle(ctypes.Structure):
    """cudaIpcMemHandle_t, which is passed by value."""

    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class Range(NamedTuple):
    """Addresses from `base` on."""

    base: int
    size: int

    def holds(self, other: Range) -> bool:
        return self.base <= other.base and other.base + other.size <= self.base + self.size


def allocated(size: int) -> int:
    """Memory of the current GPU from the driver's own allocator, so that it is nobody else's."""
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
    """Another process's allocation, on the current GPU."""
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
    """The whole one that the address lies in, as the driver of the current GPU knows it."""
    base, size = ctypes.c_void_p(), ctypes.c_size_t()
    error = _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), pointer)
    if error:
        raise RuntimeError(f"cuMemGetAddressRange failed ({error})")
    return Range(base.value or 0, size.value)


def pin(pointer: int, size: int) -> None:
    """Pages of the host stay where they are, and GPUs copy from and to them directly."""
    _call("cudaHostRegister", pointer, size, 0)


def unpin(pointer: int) -> None:
    _call("cudaHostUnregister", pointer)


def _call(name: str, *arguments: Any) -> None:
    error = getattr(_runtime(), name)(*arguments)
    if error:
        _runtime().cudaGetLastError()  # which would else be taken for the next call's
        raise RuntimeError(f"{name} failed ({_runtime().cudaGetErrorString(error).decode()})")


@cache
def _runtime() -> ctypes.CDLL:
    """By the name that torch is linked with."""
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
