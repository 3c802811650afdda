"""Integers that order as float32 values do: -0 counts as +0, nothing is said about NaN."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_of(x):
    """int32 keys with key_of(a) < key_of(b) exactly where a < b."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The float32 of an int32 key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
