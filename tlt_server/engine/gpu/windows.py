"""The window of a rank on a GPU, and the windows of its peers, mapped by CUDA IPC; in Triton's
interpreter they are files.

A rank makes its window, sends the grant to its peers, and opens theirs. The kernels of
`tlt_kernels.gpu.exchange` do the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tlt_client.channels.errors import ChannelLost
from tlt_client.channels.memory import Grant, PeerMemory, share
from tlt_kernels.gpu.exchange import PeerWindows, peer_windows, window_bytes
from tlt_server.engine.exchange.meeting import Meeting
from tlt_server.errors import EngineFailed, StartupError

JOIN_S = 120.0  # for all ranks to come
# A kernel waits this long for another rank, which may compile a kernel meanwhile.
WAIT_S = 15.0


class GroupWindows:
    """The window of this rank and, once opened, those of its peers, until `close`."""

    def __init__(self, rank: int, floats: int, device: torch.device) -> None:
        """floats: elements of each of the two rooms."""
        self._rank, self._size, self._device = rank, window_bytes(floats), device
        self._own = share(self._size, device)
        self._others: list[PeerMemory] = []
        self.grant = self._own.grant.packed()

    def open(self, grants: Sequence[bytes], *, timeout_s: float) -> PeerWindows:
        """Map the peers' windows; grants are in the order of ranks. Ranks may exchange once all of
        them have returned. `StartupError` if a GPU cannot reach another one's memory.
        """
        addresses = []
        for rank, grant in enumerate(Grant.parsed(data) for data in grants):
            if grant.size != self._own.grant.size:
                raise StartupError(
                    f"rank {rank} has a window of {grant.size} bytes, rank {self._rank} of "
                    f"{self._own.grant.size}; start all ranks with the same settings"
                )
            if rank == self._rank:
                addresses.append(self._own.view.data_ptr())
                continue
            try:
                self._others.append(PeerMemory(grant, self._device))
            except ChannelLost as error:
                raise StartupError(
                    f"rank {self._rank} on {self._device} cannot map the memory of rank {rank} "
                    f"({error.__cause__ or error}); GPUs of a group must be peers (nvidia-smi topo "
                    "-p2p r), and their processes in one container or with one IPC namespace"
                ) from None
            addresses.append(self._others[-1].address)
        own = self._own.view[: self._size]
        return peer_windows(self._rank, addresses, own, timeout_s=timeout_s)

    def close(self) -> None:
        """Unmap the peers' windows, and free this one, when no rank reads it any more."""
        for other in self._others:
            other.close()
        self._own.close()


class JoinedWindows(NamedTuple):
    peers: PeerWindows
    kept: GroupWindows | list[Tensor]  # what keeps the memory mapped

    def close(self) -> None:
        """Free this rank's window and unmap the others, when no rank reads it any more."""
        if isinstance(self.kept, GroupWindows):
            self.kept.close()


def join(
    directory: Path,
    rank: int,
    ranks: int,
    floats: int,
    device: torch.device,
    check: Callable[[], None] = lambda: None,
) -> JoinedWindows:
    """Make this rank's window and map those of the others, which come to the same directory.
    `EngineFailed` if one does not come, `StartupError` if its memory cannot be reached. `check`:
    see `Meeting`.
    """
    meeting = Meeting(directory, rank, ranks, JOIN_S, check)
    try:
        if device.type == "cuda":
            own = GroupWindows(rank, floats, device)
            grants = meeting.told("grants", own.grant)
            joined = JoinedWindows(own.open(grants, timeout_s=WAIT_S), own)
        else:
            files = [directory / f"window-{each}" for each in range(ranks)]
            windows = [_file(path, window_bytes(floats)) for path in files]
            addresses = [each.data_ptr() for each in windows]
            peers = peer_windows(rank, addresses, windows[rank], timeout_s=WAIT_S)
            joined = JoinedWindows(peers, windows)
        meeting.told("windows")  # all are zero
    except TimeoutError as error:
        raise EngineFailed(str(error)) from None
    return joined


def _file(path: Path, size: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
