"""The kernels of `exchange.py`, which describes a window.

Data that crosses a link is read and written as [H / 4, 4]: each thread has 16 bytes next to those
of its neighbours. In one dimension threads would have 32 bytes of float32, as the norm's bfloat16
rows take 16, and each load of a warp would use half of every sector that it touches.

Legend: T ranks, P partial sums of one rank, R rows, H hidden, Q = H / 4, X words.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tlt_kernels.gpu import signals
from tlt_kernels.gpu.norm import add_to_residual, tree
from tlt_kernels.gpu.target import pdl_launch, pdl_wait

MAX_RANKS = 8
# A program that pushes signals the same program of its peers, and waits for no other. GPUs start
# programs in order (CUDA does not promise it), so the first one that has not ended runs on every
# rank where there is room for one. On 128 multiprocessors all have room at once: two on each, which
# has 64 registers for each of 2 * 512 threads.
PROGRAMS = tl.constexpr(256)
PUSH_REGISTERS = 64
PUSH_FLAGS = tl.constexpr(1024)  # bytes into a window, after the flags of ranks
RANK_FLAGS = tl.constexpr(8 * MAX_RANKS)  # bytes of one program's flags
PUSH_STEPS = 2
HEAD_BYTES = PUSH_FLAGS.value + PUSH_STEPS * PROGRAMS.value * RANK_FLAGS.value


@triton.jit
def _windows(address_T, T: tl.constexpr):
    """Return all ranks' windows as a tuple. Loaded before a wait, they cause no delay after it."""
    if T == 1:
        windows = (tl.load(address_T),)
    else:
        windows = _windows(address_T, T // 2) + _windows(address_T + T // 2, T // 2)
    return windows


@triton.jit
def _quads(BLOCK: tl.constexpr):
    return 4 * tl.arange(0, BLOCK // 4)[:, None] + tl.arange(0, 4)[None, :]


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
def pull_add_rms_norm(
    address_T,
    own,
    state,
    first,
    residual_RH,
    bias_H,
    weight_H,
    out_RH,
    scales_GW,
    W,
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
    signals.meet(address_T, own.to(tl.int64), state, rank, timeout_ns, T)
    h_Q4 = _quads(BLOCK)
    at_Q4 = first + row + h_Q4
    total_Q4 = _tree_of_ranks(windows, at_Q4, rows.to(tl.int64) * H, h_Q4 < H, 0, T, P)
    # The last load decides how a row lies in registers, and so the order of the norm's sum.
    residual = tl.load(residual_RH + row + h, mask=inside, other=0.0)
    add_to_residual(
        tl.reshape(total_Q4, [BLOCK]), residual, weight, residual_RH, bias_H, weight_H, out_RH,
        scales_GW, W, tl.program_id(0), row, h, inside, eps, BIASED, NORMED, H, BLOCK,
    )  # fmt: skip


@triton.jit
def _signal_from_here(
    address_T, own, state, rank, number, timeout_ns, STEP: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """Signal this program's stores to the same program of the peers, and wait for theirs."""
    flags = PUSH_FLAGS + (STEP * PROGRAMS + tl.program_id(0)) * RANK_FLAGS
    tl.debug_barrier()  # all threads have stored
    signals.tell(address_T, rank, number, flags + rank * 8, T)
    signals.wait(own.to(tl.int64) + flags, state, rank, number, timeout_ns, 8, T)


@triton.jit(do_not_specialize=["rank", "rows"])
def push_add_rms_norm(
    address_T,
    own,
    state,
    landing,
    part_PRH,
    residual_RH,
    bias_H,
    weight_H,
    out_RH,
    scales_GW,
    W,
    eps,
    rank,
    rows,
    timeout_ns: tl.int64,
    T: tl.constexpr,
    P: tl.constexpr,
    OWNED: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write this rank's sums to every rank, next to those of the other ranks: [T, R, H], `landing`
    elements into a window. OWNED: a row's sums go only to its owner rank, which adds them and
    writes the total, after them, to all.
    """
    pdl_launch()
    h = tl.arange(0, BLOCK)
    inside = h < H
    weight = tl.load(weight_H + h, mask=inside, other=0.0).to(tl.float32) if NORMED else 0.0
    windows = _windows(address_T, T)
    p, programs, stride = tl.program_id(0), tl.num_programs(0), rows * H
    landed = own.to(tl.pointer_type(tl.float32)) + landing
    h_Q4 = _quads(BLOCK)
    inside_Q4 = h_Q4 < H
    pdl_wait()
    number = signals.next_number(state)
    for row in range(p, rows, programs):
        at = row * H + h_Q4
        own_sum = tree(part_PRH + at, stride, inside_Q4, P)
        for t in tl.static_range(T):
            if not OWNED or p % T == t:
                window = tl.multiple_of(windows[t].to(tl.pointer_type(tl.float32)), 16)
                tl.store(window + landing + rank * stride + at, own_sum, mask=inside_Q4)
    _signal_from_here(address_T, own, state, rank, number, timeout_ns, 0, T)
    if OWNED:
        if p % T == rank:
            for row in range(p, rows, programs):
                at = row * H + h_Q4
                total = tree(landed + at, stride, inside_Q4, T)
                for t in tl.static_range(T):
                    window = tl.multiple_of(windows[t].to(tl.pointer_type(tl.float32)), 16)
                    tl.store(window + landing + T * stride + at, total, mask=inside_Q4)
        _signal_from_here(address_T, own, state, rank, number, timeout_ns, 1, T)
    signals.count(state)
    for row in range(p, rows, programs):
        at = row * H + h
        residual = tl.load(residual_RH + at, mask=inside, other=0.0)
        if OWNED:
            total = tl.load(landed + T * stride + at, mask=inside, other=0.0)
        else:
            total = tree(landed + at, stride, inside, T)
        add_to_residual(
            total, residual, weight, residual_RH, bias_H, weight_H, out_RH, scales_GW, W, row,
            row * H, h, inside, eps, BIASED, NORMED, H, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rank", "times"])
def meet(address_T, own, state, times, rank, timeout_ns: tl.int64, T: tl.constexpr):
    pdl_launch()
    pdl_wait()
    for _ in range(times):
        signals.meet(address_T, own.to(tl.int64), state, rank, timeout_ns, T)
        tl.debug_barrier()  # all threads read the next number


@triton.jit(do_not_specialize=["rank"])
def gather(
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
