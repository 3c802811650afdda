"""Memory of one process that another process on the same host reads: on the host a sealed memory
file, on a GPU an allocation with its IPC handle.

The owner calls `share`, sends the `Grant` and the descriptors, and writes to `view`. The reader
calls `opened` with both, and closes first. A sealed file keeps its size, so a reader's mapping
stays valid. A GPU's handle names the base of a whole allocation, so the driver allocates each one
separately.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tlt_client.channels import cuda
from tlt_client.channels.errors import ChannelLost, ContentRefused

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GRANT = struct.Struct("<4sI16s64sQ")
MAGIC = b"TLTM"
GRAIN_BYTES = 2 * 2**20  # a smaller GPU allocation may share its block, and so its handle
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Grant(NamedTuple):
    """The message that describes shared memory to its reader; descriptors are sent with it."""

    kind: int  # a key of `KINDS`
    device: bytes  # a GPU's uuid
    handle: bytes
    size: int  # in bytes

    def packed(self) -> bytes:
        return GRANT.pack(MAGIC, *self)

    @classmethod
    def parsed(cls, data: bytes) -> Grant:
        magic, *fields = GRANT.unpack(data)
        if magic != MAGIC:
            raise ContentRefused(
                f"a grant begins with {magic!r}, not with {MAGIC!r}; install the server's version "
                "of tlt-client"
            )
        return cls(*fields)


class SharedMemory(Protocol):
    """Memory that two processes share; `view` is a uint8 tensor over all of it."""

    view: Tensor
    grant: Grant
    descriptors: Sequence[int]  # to be sent with the grant

    def close(self) -> None:
        """Free or unmap it; no other view may be left."""


class SharedHostMemory:
    kind = 1

    def __init__(self, descriptor: int, size: int, flags: int) -> None:
        """Take ownership of the descriptor."""
        import torch

        self.descriptors: Sequence[int] = (descriptor,)
        self.grant = Grant(self.kind, bytes(16), bytes(cuda.HANDLE_BYTES), size)
        self.view = torch.frombuffer(mmap.mmap(descriptor, size, flags), dtype=torch.uint8)

    @classmethod
    def share(cls, size: int, device: torch.device) -> SharedHostMemory:
        descriptor = os.memfd_create("tlt-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        return cls(descriptor, size, mmap.MAP_SHARED)

    @classmethod
    def open(cls, grant: Grant, descriptors: Sequence[int]) -> SharedHostMemory:
        try:
            (descriptor,) = descriptors
            sealed, size = (
                fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS,
                os.fstat(descriptor).st_size,
            )
        except (ValueError, OSError) as error:
            raise ContentRefused(
                f"{len(descriptors)} descriptors were sent with the memory ({error}); send one of "
                "a memory file"
            ) from None
        if not sealed or size != grant.size:
            raise ContentRefused(
                f"the memory file has {size} bytes and was granted with {grant.size}, or it can "
                "still be resized; seal it at that size"
            )
        return cls(os.dup(descriptor), size, mmap.MAP_PRIVATE)

    def close(self) -> None:
        del self.view
        os.close(self.descriptors[0])


class SharedGpuMemory:
    kind = 2

    def __init__(self, pointer: int, grant: Grant, device: torch.device, *, own: bool) -> None:
        import torch

        self.descriptors: Sequence[int] = ()
        self.grant = grant
        self._pointer, self._device, self._own = pointer, device, own
        self.view = torch.as_tensor(_Bytes(pointer, grant.size), device=device)

    @classmethod
    def share(cls, size: int, device: torch.device) -> SharedGpuMemory:
        size = -(-size // GRAIN_BYTES) * GRAIN_BYTES
        with _calls(device):
            pointer = cuda.allocated(size)
            handle = cuda.handle_of(pointer)
        return cls(pointer, Grant(cls.kind, _uuid(device.index), handle, size), device, own=True)

    @classmethod
    def open(cls, grant: Grant, descriptors: Sequence[int]) -> SharedGpuMemory:
        import torch

        visible = (
            {_uuid(index): index for index in range(torch.cuda.device_count())}
            if torch.cuda.is_available()
            else {}
        )
        if grant.device not in visible:
            raise ContentRefused(
                f"the tensors are on GPU {uuid.UUID(bytes=grant.device)}, which the engine does "
                f"not see ({len(visible)} others); serve with it in CUDA_VISIBLE_DEVICES, or push "
                "tensors of the CPU"
            )
        device = torch.device("cuda", visible[grant.device])
        with _calls(device):
            pointer = cuda.opened(grant.handle)
            try:
                check_inside(cuda.Range(pointer, grant.size), cuda.allocation(pointer))
            except BaseException:
                cuda.close(pointer)
                raise
        return cls(pointer, grant, device, own=False)

    def close(self) -> None:
        del self.view
        with _calls(self._device):
            (cuda.free if self._own else cuda.close)(self._pointer)


class PeerMemory:
    """Another process's GPU memory, mapped for the kernels of a GPU that may be a peer. It has an
    address and no view, because a view belongs to the GPU with the memory.
    """

    def __init__(self, grant: Grant, device: torch.device) -> None:
        if grant.kind != SharedGpuMemory.kind:
            raise ContentRefused(
                f"memory of kind {grant.kind} was granted, which no kernel can map"
            )
        self._device = device
        with _calls(device):
            self.address = cuda.opened(grant.handle)

    def close(self) -> None:
        with _calls(self._device):
            cuda.close(self.address)


def check_inside(granted: cuda.Range, allocation: cuda.Range) -> None:
    """Raise `ContentRefused` unless the granted range is inside the allocation."""
    if not 0 < granted.size or not allocation.holds(granted):
        raise ContentRefused(
            f"{granted.size} bytes of a GPU's memory were granted, but the handle's allocation has "
            f"{allocation.base + allocation.size - granted.base} from there on; grant no more than "
            "is allocated"
        )


@contextlib.contextmanager
def _calls(device: torch.device) -> Iterator[None]:
    """Select this GPU, and turn its errors into `ChannelLost`."""
    import torch

    try:
        with torch.cuda.device(device):
            yield
    except RuntimeError as error:
        raise ChannelLost(
            f"{error}; trainer and engine must run on one host, in one container, and the GPU must "
            "have room; else push by another channel, or tensors of the CPU"
        ) from None


KINDS: dict[int, type[SharedHostMemory] | type[SharedGpuMemory]] = {
    kind.kind: kind for kind in (SharedHostMemory, SharedGpuMemory)
}


def share(size: int, device: torch.device) -> SharedMemory:
    return (SharedGpuMemory if device.type == "cuda" else SharedHostMemory).share(size, device)


def opened(grant: Grant, descriptors: Sequence[int]) -> SharedMemory:
    """Open granted memory; the descriptors stay the caller's."""
    if grant.kind not in KINDS:
        raise ContentRefused(
            f"memory is of kind {grant.kind}, known are {sorted(KINDS)}; install the server's "
            "version of tlt-client"
        )
    return KINDS[grant.kind].open(grant, descriptors)


class _Bytes:
    """A range of GPU memory that torch can view without a copy."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


def _uuid(index: int | None) -> bytes:
    import torch

    return uuid.UUID(str(torch.cuda.get_device_properties(index).uuid)).bytes
