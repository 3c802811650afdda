"""Signals between the GPUs of a group: a rank signals its peers that it has reached an exchange,
and waits until all of them have.

Exchanges are numbered by a counter on the device, so a captured graph can be replayed. A rank's
window begins with one flag per rank, into which that rank writes the number of its newest exchange;
if each program of a kernel signals for itself, further flags follow, one per program and rank.
Numbers reach 2^43, which takes years, so a flag that some exchanges do not write is only ever low.
Every wait ends: after `timeout_ns` the first waiting thread writes to `state` for whom it waits,
and from then on nothing waits. Triton's interpreter has neither PTX nor the GPU's clock: it uses
plain loads and stores and the host's clock.

Legend: T ranks.
"""

from __future__ import annotations

import time

import triton
import triton.language as tl

from tlt_kernels.gpu.target import INTERPRETED

FLAG_BYTES = tl.constexpr(128)  # a flag has a cache line of its own
# Words of `state`: a counter of 64 bits; after a time-out the rank that was waited for, plus one,
# and the number of that exchange, its low 32 bits.
MISSED = tl.constexpr(2)
MISSED_AT = tl.constexpr(3)
STATE_WORDS = 4
# What an exchange adds to the counter: each program adds one, and the first one the rest. So the
# number of exchanges that have ended is the same for all programs of the next one.
EXCHANGE = tl.constexpr(1 << 20)

# Thread t tells rank t. The release makes what this GPU has written before visible to it.
_TELL = tl.constexpr("""{
    .reg .pred other;
    .reg .b32 t;
    .reg .b64 flag, at;
    mov.u32 t, %tid.x;
    setp.lt.u32 other, t, $4;
    setp.ne.and.u32 other, t, $2, other;
    mad.wide.u32 flag, t, 8, $1;
    @other ld.global.b64 flag, [flag];
    cvt.u64.u32 at, $5;
    add.u64 flag, flag, at;
    @other st.release.sys.global.u64 [flag], $3;
    mov.u32 $0, 0;
}""")
# Thread t waits for rank t, which may be at a later exchange already.
_WAIT = tl.constexpr("""{
    .reg .pred other, over;
    .reg .b32 t, missed;
    .reg .b64 flag, seen, now, end;
    mov.u32 t, %tid.x;
    setp.lt.u32 other, t, $5;
    setp.ne.and.u32 other, t, $3, other;
    @!other bra done;
    mad.wide.u32 flag, t, $7, $1;
    ld.acquire.sys.global.u64 seen, [flag];
    setp.ge.u64 over, seen, $4;
    @over bra done;
    ld.relaxed.gpu.global.u32 missed, [$2+8];
    setp.ne.u32 over, missed, 0;
    @over bra done;
    mov.u64 end, %globaltimer;
    add.u64 end, end, $6;
poll:
    ld.acquire.sys.global.u64 seen, [flag];
    setp.ge.u64 over, seen, $4;
    @over bra done;
    mov.u64 now, %globaltimer;
    setp.lt.u64 over, now, end;
    @over bra poll;
    add.u32 t, t, 1;
    atom.relaxed.gpu.global.cas.b32 missed, [$2+8], 0, t;
    setp.eq.u32 over, missed, 0;
    cvt.u32.u64 t, $4;
    @over st.relaxed.gpu.global.u32 [$2+12], t;
done:
    mov.u32 $0, 0;
}""")


@triton.jit
def _tell(window_T, rank, number, at, T: tl.constexpr):
    tl.inline_asm_elementwise(
        _TELL,
        "=r,l,r,l,r,r",
        [window_T.to(tl.int64), rank, number, T, at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _wait(flags, state, rank, number, timeout_ns, STRIDE: tl.constexpr, T: tl.constexpr):
    tl.inline_asm_elementwise(
        _WAIT,
        "=r,l,l,r,l,r,l,r",
        [flags, state.to(tl.int64), rank, number, T, timeout_ns, STRIDE],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()  # what those threads acquired, all threads may read


def _tell_interpreted(window_T, rank, number, at, T):
    for t in range(int(T)):
        if t != int(rank):
            flag = tl.load(window_T + t) + at
            tl.store(flag.to(tl.pointer_type(tl.int64)), number)


def _wait_interpreted(flags, state, rank, number, timeout_ns, STRIDE, T):
    end = time.monotonic_ns() + int(timeout_ns)
    for t in range(int(T)):
        flag = (flags + t * STRIDE).to(tl.pointer_type(tl.int64))
        while t != int(rank) and not int(tl.load(state + MISSED)):
            if int(tl.load(flag)) >= int(number):
                break
            if time.monotonic_ns() >= end:
                tl.store(state + MISSED, t + 1)
                tl.store(state + MISSED_AT, number.to(tl.int32))


# `tell(window_T, rank, number, at, T)`: write the number into the flag `at` bytes into the peers'
# windows. `wait(flags, ...)`: until every peer's flag, STRIDE bytes apart, has it.
if INTERPRETED:
    tell, wait = _tell_interpreted, _wait_interpreted
else:
    tell, wait = _tell, _wait


@triton.jit
def next_number(state):
    """Return the number of the exchange that begins."""
    counter = state.to(tl.pointer_type(tl.int64))
    return tl.load(counter, volatile=True) // EXCHANGE + 1


@triton.jit
def count(state):
    """Count this program of an exchange, once all its threads have the number."""
    rest = tl.where(tl.program_id(0) == 0, EXCHANGE - tl.num_programs(0), 0).to(tl.int64)
    tl.atomic_add(state.to(tl.pointer_type(tl.int64)), rest + 1, sem="relaxed")


@triton.jit
def meet(window_T, own, state, rank, timeout_ns, T: tl.constexpr):
    """Signal the peers that this rank has reached its next exchange, and wait until all of them
    have. own: the address of this rank's window.
    """
    number = next_number(state)
    if tl.program_id(0) == 0:
        tell(window_T, rank, number, rank * FLAG_BYTES, T)
    wait(own, state, rank, number, timeout_ns, FLAG_BYTES, T)
    count(state)
