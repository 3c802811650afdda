"""Memory of one process that another one on the same host reads: on a CPU a sealed memory file, on a GPU an allocation with its IPC handle.

Who has it calls `share`, sends the `Grant` and the descriptors, and writes `view`; who reads calls `opened` with both. `close` on the
reader's side comes first. A sealed file keeps its size, so a reader can never be cut off from it; a GPU's handle names the base of an
allocation, so each is made by the driver's own allocator and belongs to nobody else.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import uuid
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tlt_client.channels.errors import ChannelBroken, ContentRefused

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GRANT = struct.Struct("<4sI16s64sQ")
MAGIC = b"TLTM"
HANDLE_BYTES = 64
GRAIN_BYTES = 2 * 2**20  # of a GPU's allocations: a smaller one may share its block, and the handle, with others
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag there is


class Grant(NamedTuple):
    """What a reader is told, beside descriptors."""

    kind: int  # of `KINDS`
    device: bytes  # a GPU's uuid
    handle: bytes
    size: int  # in bytes

    def packed(self) -> bytes:
        return GRANT.pack(MAGIC, *self)

    @classmethod
    def parsed(cls, data: bytes) -> Grant:
        magic, *fields = GRANT.unpack(data)
        if magic != MAGIC:
            raise ContentRefused(f"a grant begins with {magic!r}, not with {MAGIC!r}; install the server's version of tlt-client")
        return cls(*fields)


class Memory(Protocol):
    """`view` is a tensor of uint8 over all of it."""

    view: Tensor
    grant: Grant
    descriptors: Sequence[int]  # to be sent beside the grant

    def close(self) -> None:
        """It is not used any more; no view of it may be left."""


class HostMemory:
    kind = 1

    def __init__(self, descriptor: int, size: int, flags: int) -> None:
        """Takes the descriptor over."""
        import torch

        self.descriptors: Sequence[int] = (descriptor,)
        self.grant = Grant(self.kind, bytes(16), bytes(HANDLE_BYTES), size)
        self.view = torch.frombuffer(mmap.mmap(descriptor, size, flags), dtype=torch.uint8)

    @classmethod
    def share(cls, size: int, device: torch.device) -> HostMemory:
        descriptor = os.memfd_create("tlt-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        return cls(descriptor, size, mmap.MAP_SHARED)

    @classmethod
    def open(cls, grant: Grant, descriptors: Sequence[int]) -> HostMemory:
        try:
            (descriptor,) = descriptors
            sealed, size = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS, os.fstat(descriptor).st_size
        except (ValueError, OSError) as error:
            raise ContentRefused(f"{len(descriptors)} descriptors came with the memory ({error}); send one, of a memory file") from None
        if not sealed or size != grant.size:
            raise ContentRefused(f"the memory file has {size} bytes and was granted with {grant.size}, or it can still be resized; seal "
                                 "it at that size")
        return cls(os.dup(descriptor), size, mmap.MAP_PRIVATE)

    def close(self) -> None:
        del self.view
        os.close(self.descriptors[0])


class CudaMemory:
    kind = 2

    def __init__(self, pointer: int, grant: Grant, device: torch.device, *, own: bool) -> None:
        import torch

        self.descriptors: Sequence[int] = ()
        self.grant = grant
        self._pointer, self._device, self._own = pointer, device, own
        self.view = torch.as_tensor(_Bytes(pointer, grant.size), device=device)

    @classmethod
    def share(cls, size: int, device: torch.device) -> CudaMemory:
        import torch

        size = -(-size // GRAIN_BYTES) * GRAIN_BYTES
        pointer, handle = ctypes.c_void_p(), _Handle()
        with torch.cuda.device(device):
            _call("cudaMalloc", ctypes.byref(pointer), size)
            _call("cudaIpcGetMemHandle", ctypes.byref(handle), pointer)
        assert pointer.value is not None
        return cls(pointer.value, Grant(cls.kind, _uuid(device.index), bytes(handle), size), device, own=True)

    @classmethod
    def open(cls, grant: Grant, descriptors: Sequence[int]) -> CudaMemory:
        import torch

        visible = {_uuid(index): index for index in range(torch.cuda.device_count())} if torch.cuda.is_available() else {}
        if grant.device not in visible:
            raise ContentRefused(f"the tensors are on GPU {uuid.UUID(bytes=grant.device)}, which the engine does not see "
                                 f"({len(visible)} others); serve with it in CUDA_VISIBLE_DEVICES, or push tensors of the CPU")
        device, pointer = torch.device("cuda", visible[grant.device]), ctypes.c_void_p()
        with torch.cuda.device(device):
            _call("cudaIpcOpenMemHandle", ctypes.byref(pointer), _Handle.from_buffer_copy(grant.handle), LAZY_PEER_ACCESS)
        assert pointer.value is not None
        return cls(pointer.value, grant, device, own=False)

    def close(self) -> None:
        import torch

        del self.view
        with torch.cuda.device(self._device):
            _call("cudaFree" if self._own else "cudaIpcCloseMemHandle", ctypes.c_void_p(self._pointer))


KINDS: dict[int, type[HostMemory] | type[CudaMemory]] = {kind.kind: kind for kind in (HostMemory, CudaMemory)}


def share(size: int, device: torch.device) -> Memory:
    return (CudaMemory if device.type == "cuda" else HostMemory).share(size, device)


def opened(grant: Grant, descriptors: Sequence[int]) -> Memory:
    """The descriptors stay the caller's."""
    if grant.kind not in KINDS:
        raise ContentRefused(f"memory is of kind {grant.kind}, known are {sorted(KINDS)}; install the server's version of tlt-client")
    return KINDS[grant.kind].open(grant, descriptors)


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t, which is passed by value."""

    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class _Bytes:
    """An address for torch, which makes a view of it without a copy."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 3}


def _uuid(index: int | None) -> bytes:
    import torch

    return uuid.UUID(str(torch.cuda.get_device_properties(index).uuid)).bytes


@cache
def _runtime() -> ctypes.CDLL:
    """The runtime that torch has loaded already, by the name that it is linked with."""
    import torch

    version = str(torch.version.cuda)
    try:
        library = ctypes.CDLL(f"libcudart.so.{version.split('.')[0]}")
    except OSError as error:
        raise ContentRefused(f"there is no CUDA runtime of torch's version ({version}) here: {error}; push tensors of the CPU") from None
    address = ctypes.POINTER(ctypes.c_void_p)
    library.cudaMalloc.argtypes = [address, ctypes.c_size_t]
    library.cudaFree.argtypes = [ctypes.c_void_p]
    library.cudaIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), ctypes.c_void_p]
    library.cudaIpcOpenMemHandle.argtypes = [address, _Handle, ctypes.c_uint]
    library.cudaIpcCloseMemHandle.argtypes = [ctypes.c_void_p]
    library.cudaGetErrorString.argtypes, library.cudaGetErrorString.restype = [ctypes.c_int], ctypes.c_char_p
    return library


def _call(name: str, *arguments: Any) -> None:
    error = getattr(_runtime(), name)(*arguments)
    if error:
        _runtime().cudaGetLastError()  # which would else be taken for the next call's
        raise ChannelBroken(f"{name} failed ({_runtime().cudaGetErrorString(error).decode()}); trainer and engine must run on one host, "
                            "in one container, and the GPU must have room; else push by another channel")
