"""Joins a rank with the others, through mapped memory or a library; `--exchange` decides."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tlt_client.channels.errors import ContentRefused
from tlt_client.channels.nccl import new_id
from tlt_kernels.gpu.exchange import PeerWindows, RankPeers, WindowSizes, peer_windows, window_bytes
from tlt_server.engine.exchange import windows
from tlt_server.engine.exchange.gathered import GatheredPeers, GatherLibrary, GlooGathering, rooms
from tlt_server.engine.exchange.gloo import GlooExchange
from tlt_server.engine.exchange.meeting import Meeting
from tlt_server.engine.exchange.nccl import NcclGathering
from tlt_server.engine.exchange.windows import GroupWindows
from tlt_server.errors import EngineFailed, StartupError
from tlt_server.settings.server import ExchangeName

JOIN_S = 120.0  # for all ranks to come


class JoinedRank(NamedTuple):
    peers: RankPeers
    close: Callable[[], None]  # when no rank reads this one's memory any more


class RankGroup(NamedTuple):
    """A group of ranks that meet in one directory, as seen by one of them."""

    directory: Path
    rank: int
    ranks: int
    device: torch.device
    check: Callable[[], None] = lambda: None  # as of `Meeting`

    @property
    def meeting(self) -> Meeting:
        return Meeting(self.directory, self.rank, self.ranks, JOIN_S, self.check)


class FileWindows:
    """The windows of ranks in Triton's interpreter, as files; see `GroupWindows`."""

    grant = b""

    def __init__(self, group: RankGroup, sizes: WindowSizes) -> None:
        self._rank, self._sizes = group.rank, sizes
        files = [group.directory / f"window-{each}" for each in range(group.ranks)]
        self._windows = [_file(path, window_bytes(sizes)) for path in files]

    def open(self, grants: Sequence[bytes], *, timeout_s: float) -> PeerWindows:
        addresses, own = [each.data_ptr() for each in self._windows], self._windows[self._rank]
        landing = self._sizes.landing
        return peer_windows(self._rank, addresses, own, landing=landing, timeout_s=timeout_s)

    def unmap(self) -> None: ...

    def close(self) -> None:
        self._windows.clear()


def _file(path: Path, size: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def join(group: RankGroup, sizes: WindowSizes, by: ExchangeName) -> JoinedRank:
    """Create this rank's part of the exchange and connect it with the others. `EngineFailed` if a
    rank does not join, `StartupError` if it cannot be reached.
    """
    try:
        return _gathered(group, sizes, "") if by == "nccl" else _mapped(group, sizes, by)
    except TimeoutError as error:
        raise EngineFailed(str(error)) from None


def _mapped(group: RankGroup, sizes: WindowSizes, by: ExchangeName) -> JoinedRank:
    """Map the windows of the other ranks. If one rank cannot, all gather instead, if `by` allows
    it.
    """
    own: GroupWindows | FileWindows
    if group.device.type == "cuda":
        own = GroupWindows(group.rank, sizes, group.device)
    else:
        own = FileWindows(group, sizes)
    grants, why = group.meeting.told("grants", own.grant), ""
    try:
        peers = own.open(grants, timeout_s=windows.WAIT_S)
    except StartupError as error:
        why = error.message
    told = group.meeting.told("mapped", why.encode())  # all windows are zero
    found = next((each.decode() for each in told if each), "")
    if not found:
        return JoinedRank(peers, own.close)
    own.unmap()
    group.meeting.told("unmapped")
    own.close()
    if by == "nvlink":
        raise StartupError(f"{found}, or leave out --exchange nvlink")
    if group.rank == 0:
        print(f"tlt: {found}; they exchange by NCCL now, which is slower", file=sys.stderr)
    return _gathered(group, sizes, found)


def _gathered(group: RankGroup, sizes: WindowSizes, unmapped: str) -> JoinedRank:
    """Connect the ranks by a library. `unmapped`: why mapping failed, if it was tried."""
    room_YX = rooms(sizes.room, group.device)
    try:
        library = connected(group, room_YX[0])
    except (RuntimeError, ContentRefused) as error:
        also = f", and {unmapped}" if unmapped else ""
        raise StartupError(
            f"rank {group.rank} on {group.device} cannot exchange by NCCL ({error}){also}; use "
            "--tensor-parallel 1, or a machine whose GPUs are connected"
        ) from None
    return JoinedRank(GatheredPeers(group.rank, group.ranks, room_YX, library), library.close)


def connected(group: RankGroup, room_X: Tensor) -> GatherLibrary:
    """Connect the ranks by NCCL, or by gloo under Triton's interpreter."""
    rank, ranks = group.rank, group.ranks
    if group.device.type != "cuda":
        return GlooGathering(GlooExchange(group.directory / "store", rank, ranks, left=group.check))
    id = group.meeting.told("nccl", new_id() if rank == 0 else b"")[0]
    nccl = NcclGathering(id, rank, ranks, room_X, group.check, JOIN_S)
    if rank == 0:
        nccl.watch(group.check)
    return nccl
