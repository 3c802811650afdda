"""Integers with the order of float32 values. -0 counts as +0; the order of NaN is undefined."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_of(x):
    """Return int32 keys with key_of(a) < key_of(b) exactly where a < b."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """Return the float32 of an int32 key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
