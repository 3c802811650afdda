"""Exchange of partial sums and of small results between the GPUs of a group.

A rank's *window* is memory that its peers have mapped: flags (`signals.py`), two rooms, two
landings. A matmul writes its partial sums into a room, and one kernel signals, waits for the peers,
adds all ranks' partial sums as the tree of `norm.py`, and continues like `add_rms_norm`, with the
same bits. The number of rows determines the route of the bytes (`Way`), and no bit depends on it.

All ranks call the same exchanges in the same order, with the same shapes and rooms. A peer's next
signal means that it has read the room and the landing of this exchange, so *consecutive exchanges
use different rooms*, also from one captured graph to the next; then one signal per exchange is
enough. Only peers are waited for. If rows are pulled, only the first program signals, so that grid
may be larger than the GPU.

Legend: T ranks, P partial sums of one rank, R rows, H hidden, X words.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import torch
import triton
from torch import Tensor

from tlt_kernels.gpu import exchange_kernels as kernels
from tlt_kernels.gpu import signals
from tlt_kernels.gpu.exchange_kernels import HEAD_BYTES, MAX_RANKS, PROGRAMS, PUSH_REGISTERS
from tlt_kernels.gpu.gemm_tiles import PARTS
from tlt_kernels.gpu.norm import shape
from tlt_kernels.gpu.quantise import Rows, places
from tlt_kernels.gpu.target import PDL

ROOMS = 2
_ALIGNED = 1024  # bytes: a multiple of every vector access
_WORDS = 1024  # per program of `gather`
_GRAIN = _ALIGNED // 4  # elements
_MANY = 1 << 30


class Way(Enum):
    """A route of P partial sums of R rows to all of T ranks."""

    PULL = "pull"  # every rank reads the others': (T - 1) P R H elements, after one signal
    PUSH = "push"  # every rank writes its sums to the others: (T - 1) R H, and then signals
    # The owner of a row adds it, and writes the total to the others: 2 (T - 1) / T R H elements,
    # two signals. Two ranks write as much as by PUSH, and add each row once.
    TWO_STEPS = "two steps"

    def landed(self, ranks: int) -> int:
        """Return the number of sums of a row that land in a window."""
        return {Way.PULL: 0, Way.PUSH: ranks, Way.TWO_STEPS: ranks + 1}[self]


# (rows at most, way). `tlt bench exchange` times each on two GPUs, where two steps are faster than
# PULL for more rows, too, but each row takes memory. For more ranks the borders are computed: a
# signal takes as long as 0.7 MB.
_WAYS: dict[int, tuple[tuple[int, Way], ...]] = {
    2: ((256, Way.PUSH), (512, Way.TWO_STEPS), (_MANY, Way.PULL)),
    4: ((64, Way.PULL), (512, Way.TWO_STEPS), (_MANY, Way.PULL)),
    8: ((16, Way.PULL), (512, Way.TWO_STEPS), (_MANY, Way.PULL)),
}


def way_of(ranks: int, rows: int) -> Way:
    return next(way for most, way in _WAYS[ranks] if rows <= most)


def parts_of(ranks: int, rows: int) -> int:
    """Return the minimum number of partial sums of a matmul, if it has as many reduction segments.
    Pulled sums cross the link once for each, and wide tiles of many rows need no second one.
    """
    return 1 if way_of(ranks, rows) is Way.PULL else PARTS


def landing_floats(ranks: int, rows: int, hidden: int) -> int:
    """Return the elements of each landing for exchanges of up to `rows` rows."""
    least = landing = 0
    for most, way in _WAYS[ranks]:
        if least < rows:
            landing = max(landing, way.landed(ranks) * min(most, rows) * hidden)
        least = most
    return -(-landing // _GRAIN) * _GRAIN


class WindowSizes(NamedTuple):
    """Elements of each room and of each landing."""

    room: int
    landing: int = 0  # as `landing_floats` returns it


class RankPeers(Protocol):
    """The other ranks of a group, as seen by one of them."""

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def missed(self) -> Tensor:
        """Return int32 [first rank whose wait ran out of time, plus one; number of that exchange];
        zeros if there is none, or if a library waits.
        """

    def room(self, turn: int) -> Tensor:
        """Return the float32 room of an even or odd exchange."""

    def parts(self, rows: int) -> int:
        """Return the best minimum number of partial sums of a matmul with this many rows."""

    def add_rms_norm(
        self,
        part_PRH: Tensor,
        residual_RH: Tensor,
        weight_H: Tensor | None,
        eps: float,
        *,
        bias_H: Tensor | None = None,
        out_RH: Rows,
    ) -> Rows:
        """Add all ranks' partial sums as one tree, then the bias, to the residual (in place), and
        store its norm to `out_RH`; without a weight, the residual itself.

        part_PRH: this rank's float32 partial sums, in a room; peers' lie at the same place. P is
        the same power of two on all ranks.
        """

    def gather(self, mine_X: Tensor, out_TX: Tensor) -> Tensor:
        """Copy every rank's words to `out_TX`, in rank order. mine_X: this rank's 4-byte words, of
        any shape, in a room; peers' lie at the same place.
        """

    def failure(self, missed_T: Sequence[Sequence[int]] = ()) -> str:
        """Return a message about the ranks whose wait ran out of time, or an empty string. It may
        wait for the device. missed_T: `missed` of each rank, as gathered from all ranks.
        """

    def mute(self) -> None:
        """Wait for no rank until `reset`; results of exchanges are undefined meanwhile."""

    def reset(self) -> None:
        """Restart with the first exchange. All ranks do so together, and none exchanges."""


class PeerWindows(NamedTuple):
    """The windows of a group, as mapped by one of its ranks."""

    rank: int
    address_T: Tensor  # int64: every rank's window, as this process has it mapped
    own: Tensor  # uint8: this rank's window
    landing: int  # elements of each landing
    state: Tensor  # int32 [signals.STATE_WORDS]
    timeout_ns: int  # a wait on the device ends then

    @property
    def ranks(self) -> int:
        return len(self.address_T)

    @property
    def device(self) -> torch.device:
        return self.own.device

    @property
    def missed(self) -> Tensor:
        return self.state[signals.MISSED.value :]

    def room(self, turn: int) -> Tensor:
        return self._rooms.chunk(ROOMS)[turn % ROOMS]

    def parts(self, rows: int) -> int:
        return parts_of(self.ranks, rows)

    @property
    def _rooms(self) -> Tensor:
        floats = self.own[HEAD_BYTES:].view(torch.float32)
        return floats[: len(floats) - ROOMS * self.landing]

    def failure(self, missed_T: Sequence[Sequence[int]] = ()) -> str:
        """Return the message of `RankPeers.failure` once the device has reached this point, the
        earliest wait first.
        """
        found = {**dict(enumerate(missed_T)), self.rank: self.missed.tolist()}
        waits = sorted((at % 2**32, rank, other) for rank, (other, at) in found.items() if other)
        return " and ".join(
            f"rank {rank} waited {self.timeout_ns / 1e9:g} s for rank {other - 1} in exchange {at}"
            for at, rank, other in waits
        )

    def mute(self) -> None:
        self.state[signals.MISSED.value] = MAX_RANKS + 1

    def reset(self) -> None:
        """Restart, and wait for the device, because a late zero would hide a signal."""
        self.own[:HEAD_BYTES].zero_()
        self.state.zero_()
        self.state.tolist()

    def add_rms_norm(
        self,
        part_PRH: Tensor,
        residual_RH: Tensor,
        weight_H: Tensor | None,
        eps: float,
        *,
        bias_H: Tensor | None = None,
        out_RH: Rows,
        way: Way | None = None,
    ) -> Rows:
        """`way`: the route to take, instead of the one for this number of rows."""
        parts, rows, hidden = part_PRH.shape
        assert parts in (1, 2, 4, 8) and part_PRH.dtype == torch.float32
        assert rows < signals.EXCHANGE.value
        if not rows:
            return out_RH
        way = way or way_of(self.ranks, rows)
        out = places(out_RH)
        sums = (part_PRH, residual_RH, bias_H, weight_H, *out, eps, self.rank, rows)
        meta = {
            "T": self.ranks,
            "P": parts,
            "BIASED": bias_H is not None,
            "NORMED": weight_H is not None,
            **shape(hidden),
            **PDL,
        }
        first = self._first(part_PRH)
        if way is Way.PULL:
            kernels.pull_add_rms_norm[(rows,)](
                self.address_T, self.own, self.state, first, *sums[1:], self.timeout_ns, **meta
            )
            return out_RH
        landed = way.landed(self.ranks) * rows * hidden
        assert landed <= self.landing, f"{landed} elements for a landing of {self.landing}"
        kernels.push_add_rms_norm[(min(rows, PROGRAMS.value),)](
            self.address_T,
            self.own,
            self.state,
            self._landing(first),
            *sums,
            self.timeout_ns,
            OWNED=way is Way.TWO_STEPS,
            maxnreg=PUSH_REGISTERS,
            **meta,
        )
        return out_RH

    def gather(self, mine_X: Tensor, out_TX: Tensor) -> Tensor:
        words = mine_X.numel()
        assert out_TX.numel() == self.ranks * words and out_TX.is_contiguous()
        if words:
            kernels.gather[(triton.cdiv(words, _WORDS),)](
                self.address_T,
                self.own,
                self.state,
                self._first(mine_X),
                out_TX.view(torch.int32),
                words,
                self.rank,
                self.timeout_ns,
                T=self.ranks,
                BLOCK=_WORDS,
                num_warps=4,
                **PDL,
            )
        return out_TX

    def meet(self, times: int = 1) -> None:
        """Wait on the device until all ranks have reached this point, for the duration of `times`
        exchanges.
        """
        kernels.meet[(1,)](
            self.address_T,
            self.own,
            self.state,
            times,
            self.rank,
            self.timeout_ns,
            T=self.ranks,
            num_warps=1,
            **PDL,
        )

    def _first(self, mine: Tensor) -> int:
        """Return the offset of a tensor in this rank's rooms, in 4-byte words."""
        first, rooms = mine.data_ptr() - self.own.data_ptr(), self._rooms
        assert mine.is_contiguous() and mine.element_size() == 4
        assert HEAD_BYTES <= first, "not in a room"
        assert first + mine.nbytes <= HEAD_BYTES + rooms.nbytes, "not in a room"
        return first // 4

    def _landing(self, first: int) -> int:
        """Return the offset of the landing for the room at `first`."""
        rooms = len(self._rooms)
        turn = ROOMS * (first - HEAD_BYTES // 4) // rooms
        return HEAD_BYTES // 4 + rooms + turn * self.landing


def window_bytes(sizes: WindowSizes) -> int:
    """Return the size of a window with rooms of at least these sizes."""
    room = -(-4 * sizes.room // _ALIGNED) * _ALIGNED
    return HEAD_BYTES + ROOMS * (room + 4 * sizes.landing)


def peer_windows(
    rank: int, addresses: Sequence[int], own: Tensor, *, landing: int = 0, timeout_s: float = 10.0
) -> PeerWindows:
    """Return the peers of a rank with the zeroed uint8 window `own`. Ranks may exchange once every
    rank has called this.
    """
    ranks = len(addresses)
    if ranks not in (2, 4, MAX_RANKS) or not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks} cannot exchange; take a group of 2, 4 or 8 ranks")
    if any(address % _ALIGNED for address in addresses) or own.data_ptr() != addresses[rank]:
        raise ValueError(
            f"windows begin at multiples of {_ALIGNED} bytes, and rank {rank}'s is its own; "
            f"share memory of the driver, not a part of it ({[hex(each) for each in addresses]})"
        )
    rooms = own.nbytes - HEAD_BYTES - ROOMS * 4 * landing
    if rooms % (ROOMS * _ALIGNED) or rooms <= 0:
        raise ValueError(f"a window of {own.nbytes} bytes has no equal rooms; use window_bytes()")
    peers = PeerWindows(
        rank,
        torch.tensor(addresses, dtype=torch.int64, device=own.device),
        own,
        landing,
        torch.zeros(signals.STATE_WORDS, dtype=torch.int32, device=own.device),
        int(timeout_s * 1e9),
    )
    peers.reset()
    return peers
