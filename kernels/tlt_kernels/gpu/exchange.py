"""Exchange of partial sums and of small results between the GPUs of a group, each of which reads
what it needs from its peers' memory.

A rank's *window* is memory that its peers have mapped: flags (`signals.py`), then two rooms. A
matmul writes its partial sums into a room, and one kernel signals, waits for the peers, adds all
ranks' partial sums as the tree of `norm.py`, and goes on as `add_rms_norm`, to the same bits. All
ranks call the same exchanges in the same order, with the same shapes and rooms. A peer's next
signal says that it has read the room of this exchange, so *exchanges that follow one another use
different rooms*, also from one captured graph to the next; then one signal per exchange is enough.
Only the first program signals, and nothing but peers is waited for, so a grid may be larger than
the GPU.

Legend: T ranks, P partial sums of one rank, R rows, H hidden, X words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt_kernels.gpu import signals
from tlt_kernels.gpu.norm import add_to_residual, shape, tree
from tlt_kernels.gpu.target import PDL, pdl_launch, pdl_wait

MAX_RANKS = 8
ROOMS = 2
_ALIGNED = 1024  # bytes: flags of eight ranks, and a multiple of every vector access
_WORDS = 1024  # per program of `gather`


class PeerWindows(NamedTuple):
    """The windows of a group, as one of its ranks has them mapped."""

    rank: int
    address_T: Tensor  # int64: every rank's window, as this process has it mapped
    own: Tensor  # uint8: this rank's window
    state: Tensor  # int32 [signals.STATE_WORDS]
    timeout_ns: int  # a wait on the device ends then

    @property
    def ranks(self) -> int:
        return len(self.address_T)

    def room(self, turn: int) -> Tensor:
        """Return the float32 room of an even or odd exchange of this rank's window."""
        return self.own[_ALIGNED:].view(torch.float32).chunk(ROOMS)[turn % ROOMS]

    def failure(self) -> str:
        """Return which rank was waited for in vain, or nothing. It waits for the device."""
        missed, number = self.state[signals.MISSED.value :].tolist()
        if not missed:
            return ""
        waited = f"rank {self.rank} waited {self.timeout_ns / 1e9:g} s"
        return f"{waited} for rank {missed - 1} in exchange {number}"

    def mute(self) -> None:
        """Wait for no rank until `reset`: what is exchanged meanwhile is undefined."""
        self.state[signals.MISSED.value] = MAX_RANKS + 1

    def reset(self) -> None:
        """Begin again with the first exchange, while all ranks do so and none exchanges. It waits
        for the device, because a late zero would hide a peer's signal.
        """
        self.own[:_ALIGNED].zero_()
        self.state.zero_()
        self.state.tolist()


def window_bytes(floats: int) -> int:
    """Return the size of a window with rooms of at least `floats` elements."""
    room = -(-4 * floats // _ALIGNED) * _ALIGNED
    return _ALIGNED + ROOMS * room


def peer_windows(
    rank: int, addresses: Sequence[int], own: Tensor, *, timeout_s: float = 10.0
) -> PeerWindows:
    """Return the peers of a rank with the uint8 window `own`, which is zeroed. Ranks may exchange
    once all of them have called this.
    """
    ranks = len(addresses)
    if ranks not in (2, 4, MAX_RANKS) or not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks} cannot exchange; take a group of 2, 4 or 8 ranks")
    if any(address % _ALIGNED for address in addresses) or own.data_ptr() != addresses[rank]:
        raise ValueError(
            f"windows begin at multiples of {_ALIGNED} bytes, and rank {rank}'s is its own; "
            f"share memory of the driver, not a part of it ({[hex(each) for each in addresses]})"
        )
    if (own.nbytes - _ALIGNED) % (ROOMS * _ALIGNED) or own.nbytes <= _ALIGNED:
        raise ValueError(f"a window of {own.nbytes} bytes has no equal rooms; use window_bytes()")
    peers = PeerWindows(
        rank,
        torch.tensor(addresses, dtype=torch.int64, device=own.device),
        own,
        torch.zeros(signals.STATE_WORDS, dtype=torch.int32, device=own.device),
        int(timeout_s * 1e9),
    )
    peers.reset()
    return peers


@triton.jit
def _windows(address_T, T: tl.constexpr):
    """Return all ranks' windows as a tuple. Loaded before a wait, they delay nothing after it."""
    if T == 1:
        windows = (tl.load(address_T),)
    else:
        windows = _windows(address_T, T // 2) + _windows(address_T + T // 2, T // 2)
    return windows


@triton.jit
def _tree_of_ranks(
    windows, at, stride, mask, FIRST: tl.constexpr, T: tl.constexpr, P: tl.constexpr
):
    """Return the sum of all ranks' partial sums, which begin `at` elements into their windows."""
    if T == 1:
        window = tl.multiple_of(windows[FIRST].to(tl.pointer_type(tl.float32)), 16)
        total = tree(window + at, stride, mask, P)
    else:
        total = _tree_of_ranks(windows, at, stride, mask, FIRST, T // 2, P)
        total += _tree_of_ranks(windows, at, stride, mask, FIRST + T // 2, T // 2, P)
    return total


@triton.jit(do_not_specialize=["rank", "rows"])
def _exchange_add_rms_norm(
    address_T,
    own,
    state,
    first,
    residual_RH,
    bias_H,
    weight_H,
    out_RH,
    eps,
    rank,
    rows,
    timeout_ns: tl.int64,
    T: tl.constexpr,
    P: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pdl_launch()
    h = tl.arange(0, BLOCK)
    inside = h < H
    weight = tl.load(weight_H + h, mask=inside, other=0.0).to(tl.float32) if NORMED else 0.0
    windows = _windows(address_T, T)
    row = tl.program_id(0).to(tl.int64) * H
    pdl_wait()
    residual = tl.load(residual_RH + row + h, mask=inside, other=0.0)
    signals.meet(address_T, own.to(tl.int64), state, rank, timeout_ns, T)
    total = _tree_of_ranks(windows, first + row + h, rows.to(tl.int64) * H, inside, 0, T, P)
    add_to_residual(
        total, residual, weight, residual_RH, bias_H, out_RH, row, h, inside, eps,
        BIASED, NORMED, H,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rank", "times"])
def _meet(address_T, own, state, times, rank, timeout_ns: tl.int64, T: tl.constexpr):
    pdl_launch()
    pdl_wait()
    for _ in range(times):
        signals.meet(address_T, own.to(tl.int64), state, rank, timeout_ns, T)
        tl.debug_barrier()  # all threads read the next number


@triton.jit(do_not_specialize=["rank"])
def _gather(
    address_T,
    own,
    state,
    first,
    out_TX,
    X,
    rank,
    timeout_ns: tl.int64,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy a block of words from every rank's window."""
    pdl_launch()
    windows = _windows(address_T, T)
    x = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pdl_wait()
    signals.meet(address_T, own.to(tl.int64), state, rank, timeout_ns, T)
    for t in tl.static_range(T):
        window = tl.multiple_of(windows[t].to(tl.pointer_type(tl.int32)), 16)
        word = tl.load(window + first + x, mask=x < X, other=0)
        tl.store(out_TX + X.to(tl.int64) * t + x, word, mask=x < X)


def _first(peers: PeerWindows, mine: Tensor) -> int:
    """Return where a tensor of this rank's window begins, in words of 4 bytes."""
    first = mine.data_ptr() - peers.own.data_ptr()
    assert mine.is_contiguous() and mine.element_size() == 4
    assert _ALIGNED <= first and first + mine.nbytes <= peers.own.nbytes, "not in this window"
    return first // 4


def exchange_add_rms_norm(
    peers: PeerWindows,
    part_PRH: Tensor,
    residual_RH: Tensor,
    weight_H: Tensor | None,
    eps: float,
    *,
    bias_H: Tensor | None = None,
    out_RH: Tensor,
) -> Tensor:
    """Add all ranks' partial sums as one tree, then the bias, to the residual (in place), and store
    its norm to `out_RH`; without a weight, the residual itself.

    part_PRH: this rank's float32 partial sums, in a room of its window; peers' lie at the same
    place. P is the same power of two on all ranks.
    """
    parts, rows, hidden = part_PRH.shape
    assert parts in (1, 2, 4, 8) and part_PRH.dtype == torch.float32
    assert rows < signals.EXCHANGE.value
    if rows:
        _exchange_add_rms_norm[(rows,)](
            peers.address_T,
            peers.own,
            peers.state,
            _first(peers, part_PRH),
            residual_RH,
            bias_H,
            weight_H,
            out_RH,
            eps,
            peers.rank,
            rows,
            peers.timeout_ns,
            T=peers.ranks,
            P=parts,
            BIASED=bias_H is not None,
            NORMED=weight_H is not None,
            **shape(hidden),
            **PDL,
        )
    return out_RH


def meet(peers: PeerWindows, times: int = 1) -> None:
    """Wait on the device until all ranks have come here, `times` exchanges long."""
    _meet[(1,)](
        peers.address_T,
        peers.own,
        peers.state,
        times,
        peers.rank,
        peers.timeout_ns,
        T=peers.ranks,
        num_warps=1,
        **PDL,
    )


def gather(peers: PeerWindows, mine_X: Tensor, out_TX: Tensor) -> Tensor:
    """Copy every rank's words to `out_TX`, in the order of ranks. mine_X: this rank's words of 4
    bytes, of any shape, in a room of its window; peers' lie at the same place.
    """
    words = mine_X.numel()
    assert out_TX.numel() == peers.ranks * words and out_TX.is_contiguous()
    if words:
        _gather[(triton.cdiv(words, _WORDS),)](
            peers.address_T,
            peers.own,
            peers.state,
            _first(peers, mine_X),
            out_TX.view(torch.int32),
            words,
            peers.rank,
            peers.timeout_ns,
            T=peers.ranks,
            BLOCK=_WORDS,
            num_warps=4,
            **PDL,
        )
    return out_TX
