"""The window of a rank on a GPU, and the windows of its peers, mapped by CUDA IPC.

A rank makes its window, sends the grant to its peers, and opens theirs. The kernels of
`tlt_kernels.gpu.exchange` do the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tlt_client.channels.errors import ChannelLost
from tlt_client.channels.memory import Grant, PeerMemory, share
from tlt_kernels.gpu.exchange import PeerWindows, WindowSizes, peer_windows, window_bytes
from tlt_server.errors import StartupError

# A kernel waits this long for another rank, which may compile a kernel meanwhile.
WAIT_S = 10.0


class GroupWindows:
    """The window of this rank and, once opened, those of its peers, until `close`."""

    def __init__(self, rank: int, sizes: WindowSizes, device: torch.device) -> None:
        self._rank, self._sizes, self._device = rank, sizes, device
        self._size = window_bytes(sizes)
        self._own = share(self._size, device)
        self._others: list[PeerMemory] = []
        self.grant = self._own.grant.packed()

    def open(self, grants: Sequence[bytes], *, timeout_s: float) -> PeerWindows:
        """Map the peers' windows; grants are in rank order. Ranks may exchange once every rank has
        returned from this. `StartupError` if a GPU cannot reach another one's memory.
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
        return peer_windows(
            self._rank, addresses, own, landing=self._sizes.landing, timeout_s=timeout_s
        )

    def unmap(self) -> None:
        """Unmap the peers' windows."""
        while self._others:
            self._others.pop().close()

    def close(self) -> None:
        """Unmap the peers' windows and free this one. No rank may be reading it."""
        self.unmap()
        self._own.close()
