"""All-gathers of NCCL on the computing stream, launched or captured: the library moves bytes and
never adds.

The communicator blocks, as captures require, so a thread joins it and every wait for it is bounded.
It is aborted, never waited for: a gather that waits for a dead rank would hold the GPU for ever, so
`watch` looks for dead ranks meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from tlt_client.channels.nccl import SUCCESS, UINT8, NcclConfig, NcclId, check_result, library
from tlt_server.errors import EngineFailed, TltError

BLOCKING = 1
POLL_S = 0.02
LOOK_S = 0.1  # between two checks whether all ranks live
# Buffers of graphs would be registered with all ranks while one captures.
ENVIRONMENT = {"NCCL_GRAPH_REGISTER": "0"}


class NcclGathering:
    def __init__(
        self,
        id: bytes,
        rank: int,
        ranks: int,
        room_X: Tensor,
        check: Callable[[], None],
        timeout_s: float,
    ) -> None:
        """Join the ranks with the same id. room_X: as large as any gathered tensor. `check`: raises
        to end the wait, for example after a rank's death. `RuntimeError` if NCCL cannot connect the
        GPUs, `EngineFailed` after `timeout_s`.
        """
        os.environ.update(ENVIRONMENT)
        self._id, self._rank, self._ranks = id, rank, ranks
        self._library, self._joined = library(), ctypes.c_void_p()
        self._closed, self._closing = threading.Event(), threading.Lock()
        failed: list[Exception] = []
        thread = threading.Thread(target=self._join, args=(room_X, failed), daemon=True)
        thread.start()
        end_s = time.monotonic() + timeout_s
        while thread.is_alive():
            thread.join(POLL_S)
            check()
            if time.monotonic() > end_s:
                raise EngineFailed(
                    f"NCCL did not connect rank {rank} with the others in {timeout_s:g} s"
                )
        if failed:
            raise RuntimeError(str(failed[0])) from failed[0]

    def _join(self, room_X: Tensor, failed: list[Exception]) -> None:
        config = NcclConfig(ctypes.sizeof(NcclConfig), 0xCAFEBEEF, 21400, BLOCKING)
        try:
            with torch.cuda.device(room_X.device):
                joined, id = ctypes.byref(self._joined), NcclId.from_buffer_copy(self._id)
                check_result(
                    self._library.ncclCommInitRankConfig(
                        joined, self._ranks, id, self._rank, ctypes.byref(config)
                    )
                )
                self._connect(room_X)
        except Exception as error:
            failed.append(error)

    def _connect(self, room_X: Tensor) -> None:
        """Gather a small and a large tensor: this connects GPUs for all sizes, which a capture
        could not.
        """
        out_X = room_X.new_empty(self._ranks * len(room_X))
        for elements in (256, len(room_X)):
            self.gather(room_X[:elements], out_X[: self._ranks * elements])
        torch.cuda.synchronize(room_X.device)

    def gather(self, mine_X: Tensor, out_X: Tensor) -> None:
        if self._closed.is_set():
            raise EngineFailed("NCCL was aborted, because a rank has ended")
        stream = torch.cuda.current_stream(mine_X.device).cuda_stream
        check_result(
            self._library.ncclAllGather(
                mine_X.data_ptr(), out_X.data_ptr(), mine_X.nbytes, UINT8, self._joined, stream
            )
        )

    def failure(self) -> str:
        state = ctypes.c_int()
        if not self._closed.is_set():
            check_result(self._library.ncclCommGetAsyncError(self._joined, ctypes.byref(state)))
        if state.value == SUCCESS:
            return ""
        return f"NCCL: {self._library.ncclGetErrorString(state.value).decode()}"

    def watch(self, check: Callable[[], None]) -> None:
        """Close this once `check` raises or its object is gone, so that waits for the GPU end.
        `check`: a method.
        """
        method = weakref.WeakMethod(check)
        threading.Thread(target=self._watch, args=(method,), daemon=True).start()

    def _watch(self, method: weakref.WeakMethod[Callable[[], None]]) -> None:
        while not self._closed.wait(LOOK_S):
            if _ended(method):
                self.close()

    def close(self) -> None:
        """Abort without waiting: kernels end at once, and NCCL's call ends with the last graph that
        captured gathers.
        """
        with self._closing:
            first = not self._closed.is_set()
            self._closed.set()
        if first and self._joined:
            abort = self._library.ncclCommAbort
            # At the interpreter's end no thread can start; the GPU's work ends with the process.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=abort, args=(self._joined,), daemon=True).start()


def _ended(method: weakref.WeakMethod[Callable[[], None]]) -> bool:
    """Return True if the method raises, or its object is gone."""
    check = method()
    try:
        if check is not None:
            check()
            return False
    except TltError:
        pass
    return True
