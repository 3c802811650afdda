"""Facts about the target: the size of blocks, and the differences between a GPU and Triton's CPU
interpreter, which are dot products and programmatic dependent launch.

The interpreter computes bfloat16 dots wrongly (fp16 and fp32 are exact), so operands are widened
there. On a GPU a kernel launched with `**PDL` may start while the previous one still runs:
`pdl_launch` lets the next kernel start, `pdl_wait` waits until all earlier kernels have finished. A
kernel that did not wait could finish before its predecessor, so all of them wait.
"""

from __future__ import annotations

import os
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INTERPRETED = tl.constexpr(_INTERPRETED)
WARP = 32  # threads that run together
PDL: dict[str, Any] = {} if _INTERPRETED else {"launch_pdl": True}


def lanes(count: int, least: int = WARP) -> int:
    """Return the size of a block for `count` elements, a power of two. Blocks smaller than `least`
    would be more variants of a kernel to compile, and no faster.
    """
    return max(triton.next_power_of_2(count), least)


@triton.jit
def dot(a, b, acc):
    """Return acc + a @ b in fp32. fp32 operands are multiplied as fp32, never as tf32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def pdl_wait():
    if not INTERPRETED:
        gdc_wait()


@triton.jit
def pdl_launch():
    if not INTERPRETED:
        gdc_launch_dependents()
