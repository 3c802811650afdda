"""A communicator of NCCL through the library that torch ships, created from the 128 bytes of its
id, as in trainers that drive vLLM.

Rank 0 stores the id in the group's store, or sends it by other means. Then all ranks sum up one
number, and rank 0 broadcasts. The communicator is non-blocking and has its own stream, so every
wait is bounded and nothing else on the GPU waits for a trainer. It has the methods of torch's
process groups that `groups` calls; a failed call raises `RuntimeError`.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from tlt_client.channels.errors import ContentRefused

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ID_BYTES = 128
KEY = "broadcast_from/0/0"  # the id's key in a store
# A store's message may be an id in a pickled struct. It is never unpickled: this pattern finds its
# bytes.
MEMO = rb"(?:\x94|q.)"
WRITTEN = re.compile(
    rb"\x80[\x03-\x05].{0,400}?ncclUniqueId.{0,16}?C\x80(.{128})%b\x86%b\x86%bR%b\."
    % (MEMO, MEMO, MEMO, MEMO),
    re.DOTALL,
)
SUCCESS, INVALID_USAGE, IN_PROGRESS = 0, 5, 7  # values of ncclResult_t
UINT8, FLOAT32, SUM = 1, 7, 0  # values of ncclDataType_t and ncclRedOp_t
POLL_S = 0.0002


def new_id() -> bytes:
    id = NcclId()
    check_result(library().ncclGetUniqueId(ctypes.byref(id)))
    return bytes(id)


def id_in(message: bytes) -> bytes:
    """Return the id in rank 0's message: plain bytes, or the format of vLLM's trainers."""
    found = WRITTEN.fullmatch(message)
    if len(message) != ID_BYTES and found is None:
        raise ContentRefused(
            f"the store has {len(message)} bytes under {KEY!r}, not an id of NCCL; let rank "
            f"0 store its {ID_BYTES} bytes there, or send them as nccl_unique_id_b64"
        )
    return found[1] if found is not None else message


class Communicator:
    """A communicator that all ranks have joined when the constructor returns."""

    def __init__(
        self, id: bytes, rank: int, size: int, device: torch.device, timeout_s: float
    ) -> None:
        """`timeout_s` bounds the joining as a whole."""
        import torch

        self._library, self._device, self._joined = library(), device, ctypes.c_void_p()
        config = NcclConfig(ctypes.sizeof(NcclConfig), 0xCAFEBEEF, 21400, 0)
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)
            one = torch.zeros(1, device=device)
            check_result(
                self._library.ncclCommInitRankConfig(
                    ctypes.byref(self._joined),
                    size,
                    NcclId.from_buffer_copy(id),
                    rank,
                    ctypes.byref(config),
                )
            )
        until = time.monotonic() + timeout_s
        try:
            self._until(lambda: self._state() == SUCCESS, timeout_s)
            summed = self._begin(
                lambda stream: self._library.ncclAllReduce(
                    one.data_ptr(), one.data_ptr(), 1, FLOAT32, SUM, self._joined, stream
                )
            )
            summed.wait(timedelta(seconds=until - time.monotonic()))
        except RuntimeError:
            self.abort()
            raise

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> NcclWork:
        """Start to broadcast the root's bytes into every rank's one tensor."""
        (tensor,) = tensors
        return self._begin(
            lambda stream: self._library.ncclBroadcast(
                tensor.data_ptr(),
                tensor.data_ptr(),
                tensor.nbytes,
                UINT8,
                options.rootRank,
                self._joined,
                stream,
            )
        )

    def abort(self) -> None:
        """End the communicator and its open operations."""
        joined, self._joined = self._joined, ctypes.c_void_p()
        if joined:
            self._library.ncclCommAbort(joined)

    def _begin(self, launch: Callable[[int], int]) -> NcclWork:
        """Launch after the work queued on the current stream."""
        import torch

        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            check_result(launch(self._stream.cuda_stream))
        return NcclWork(self._stream, self._state, self._until)

    def _until(self, done: Callable[[], bool], timeout_s: float) -> None:
        give_up = time.monotonic() + timeout_s
        while not done():
            check_result(self._state())
            if time.monotonic() > give_up:
                raise RuntimeError(f"NCCL waited for {timeout_s:g} s")
            time.sleep(POLL_S)

    def _state(self) -> int:
        state = ctypes.c_int()
        check_result(self._library.ncclCommGetAsyncError(self._joined, ctypes.byref(state)))
        return state.value


class NcclWork:
    """The last launched operation; it must end before the next one is launched."""

    def __init__(
        self,
        stream: torch.cuda.Stream,
        state: Callable[[], int],
        until: Callable[[Callable[[], bool], float], None],
    ) -> None:
        self._stream, self._state, self._until = stream, state, until
        self._event: torch.cuda.Event | None = None  # recorded after it, once it is on the stream

    def is_completed(self) -> bool:
        state = self._state()
        check_result(state)  # after the loss of a rank it would never complete
        if self._event is None and state == SUCCESS:
            self._event = self._stream.record_event()
        return self._event is not None and self._event.query()

    def wait(self, timeout: timedelta) -> None:
        self._until(self.is_completed, timeout.total_seconds())


class NcclId(ctypes.Structure):
    """The struct ncclUniqueId, passed by value."""

    _fields_ = [("internal", ctypes.c_char * ID_BYTES)]


class NcclConfig(ctypes.Structure):
    """The struct ncclConfig_t of version 2.14, which later versions accept."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    ]


_POINTER, _NUMBER, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_COLLECTIVE = [_POINTER, _POINTER, _SIZE, _NUMBER, _NUMBER, _POINTER, _POINTER]
_CONFIG = ctypes.POINTER(NcclConfig)
ARGUMENTS: dict[str, list[Any]] = {
    "ncclGetUniqueId": [ctypes.POINTER(NcclId)],
    "ncclCommInitRankConfig": [ctypes.POINTER(_POINTER), _NUMBER, NcclId, _NUMBER, _CONFIG],
    "ncclCommGetAsyncError": [_POINTER, ctypes.POINTER(_NUMBER)],
    "ncclAllReduce": _COLLECTIVE,
    "ncclBroadcast": _COLLECTIVE,
    "ncclAllGather": [_POINTER, _POINTER, _SIZE, _NUMBER, _POINTER, _POINTER],
    "ncclCommAbort": [_POINTER],
    "ncclGetErrorString": [_NUMBER],
}


@cache
def library() -> ctypes.CDLL:
    """Return the library that torch has loaded, by the name that torch is linked with."""
    import torch

    torch.cuda.init()
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise ContentRefused(
            f"torch here has no NCCL ({error}); make the group with backend gloo"
        ) from None
    library.ncclGetErrorString.restype = ctypes.c_char_p
    for name, arguments in ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
    return library


def check_result(result: int) -> None:
    if result not in (SUCCESS, IN_PROGRESS):
        advice = (
            "; ranks need a GPU each: on one GPU push by ipc" if result == INVALID_USAGE else ""
        )
        raise RuntimeError(f"NCCL: {library().ncclGetErrorString(result).decode()}{advice}")
