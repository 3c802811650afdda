"""Sums of tensors: `mix64`, by which this server names what it holds, of values, quick on any
device and the same on all; `xxh3` of bytes, which a trainer's half declares on the host, where
nothing in torch sums as fast as memory is read.

`mix64:<16 hex digits>` of n elements u_0 .. u_{n-1}, all modulo 2^64: mix(n + sum over i of mix(u_i
+ (i + 1) * G)), where u is the 32 bits of a float32 value, whatever the type that it is stored in,
or the 64 bits of an integer; mix is the finalizer of SplitMix64 (Steele, Lea, Flood 2014) and G its
increment. Addition has no order, so a device may add as it likes. It tells faults and versions
apart, up to one chance in 2^64. Neither withstands somebody who looks for two tensors of one sum:
for that a manifest may name sha256.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MASK = 2**64 - 1
_CHUNK = 1 << 22  # elements at once


def mix64(tensor: Tensor) -> str:
    """Of a tensor on any device, with torch alone. Raises `TypeError` for complex and quantized
    types.
    """
    import torch

    flat = tensor.detach().reshape(-1)
    if flat.is_complex() or flat.is_quantized:
        raise TypeError(f"there is no sum of {flat.dtype} values; push real numbers")
    total = 0
    for start in range(0, len(flat), _CHUNK):
        part = flat[start : start + _CHUNK]
        bits = (
            part.float().view(torch.int32).long() & 0xFFFFFFFF
            if part.is_floating_point()
            else part.long()
        )
        index = torch.arange(start + 1, start + 1 + len(part), device=part.device)
        total += int(_mixed(bits + index * _signed(GOLDEN)).sum())
    return finished(total, len(flat))


def xxh3(data: memoryview) -> str:
    """Of bytes, 128 bits."""
    return f"xxh3:{xxhash.xxh3_128_hexdigest(data)}"


def finished(total: int, count: int) -> str:
    """The sum's name, from the sum of the mixed elements."""
    z = (total + count) & MASK
    z = (z ^ z >> 30) * FACTORS[0] & MASK
    z = (z ^ z >> 27) * FACTORS[1] & MASK
    return f"mix64:{z ^ z >> 31:016x}"


def _mixed(z: Tensor) -> Tensor:
    z = (z ^ z >> 30 & 2**34 - 1) * _signed(FACTORS[0])
    z = (z ^ z >> 27 & 2**37 - 1) * _signed(FACTORS[1])
    return z ^ z >> 31 & 2**33 - 1


def _signed(word: int) -> int:
    """As torch's int64 holds it."""
    return word - 2**64 if word >= 2**63 else word
