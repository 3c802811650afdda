"""Checksums of tensors. `mix64` is computed from values: it is fast on any device and the same on
all, and the server reports its weights by it. `xxh3` is computed from bytes: a trainer's half
declares it for tensors on the host, where no checksum in torch is as fast as reading memory.

`mix64:<16 hex digits>` of n elements u_0 .. u_{n-1}, all modulo 2^64: mix(n + sum over i of mix(u_i
+ (i + 1) * G)), where u is the 32 bits of a float value converted to float32, or the 64 bits of an
integer; mix is the finalizer of SplitMix64 (Steele, Lea, Flood 2014) and G its increment. Addition
modulo 2^64 has no order, so a device may add in any. Two different tensors have the same checksum
with probability 2^-64. Neither function withstands a search for collisions; against that a manifest
may declare sha256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MASK = 2**64 - 1
_CHUNK = 1 << 22  # elements per pass


def mix64(tensor: Tensor) -> str:
    """Return the checksum of a tensor on any device, using only torch. Raise `TypeError` for
    complex and quantized types.
    """
    import torch

    flat = tensor.detach().reshape(-1)
    if flat.is_complex() or flat.is_quantized:
        raise TypeError(f"{flat.dtype} values have no checksum; push real numbers")
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
    """Return the 128-bit checksum of bytes."""
    return f"xxh3:{xxhash.xxh3_128_hexdigest(data)}"


def digest(sums: Mapping[str, str]) -> str:
    """Return one name for the checksums of all tensors, by name."""
    lines = "\n".join(f"{name} {sums[name]}" for name in sorted(sums))
    return hashlib.sha256(lines.encode()).hexdigest()


def finished(total: int, count: int) -> str:
    """Return the checksum's text, from the sum of the mixed elements."""
    z = (total + count) & MASK
    z = (z ^ z >> 30) * FACTORS[0] & MASK
    z = (z ^ z >> 27) * FACTORS[1] & MASK
    return f"mix64:{z ^ z >> 31:016x}"


def _mixed(z: Tensor) -> Tensor:
    z = (z ^ z >> 30 & 2**34 - 1) * _signed(FACTORS[0])
    z = (z ^ z >> 27 & 2**37 - 1) * _signed(FACTORS[1])
    return z ^ z >> 31 & 2**33 - 1


def _signed(word: int) -> int:
    """Return the int64 with the bits of the word."""
    return word - 2**64 if word >= 2**63 else word
