"""Checksums of tensors: over the bytes as pushed, and over the float32 values that are live."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import xxhash
from torch import Tensor

from tlt_client.channels.tensors import raw
from tlt_server.errors import WeightsRefused

KINDS = ("sha256", "xxh3")
XXH3_128_DIGITS = 32


def kind_of(declared: str) -> str:
    """Of a declared checksum; xxh3 comes in two lengths."""
    kind, _, digits = declared.partition(":")
    return "xxh3_128" if kind == "xxh3" and len(digits) == XXH3_128_DIGITS else kind


def checksum(kind: str, tensor: Tensor) -> str:
    """`kind:hex` of a contiguous tensor's bytes (row-major, little-endian)."""
    data = raw(tensor.cpu())
    if kind == "sha256":
        return f"sha256:{hashlib.sha256(data).hexdigest()}"
    if kind == "xxh3":
        return f"xxh3:{xxhash.xxh3_64_hexdigest(data)}"
    if kind == "xxh3_128":
        return f"xxh3:{xxhash.xxh3_128_hexdigest(data)}"
    raise WeightsRefused(f"checksum kind {kind[:20]!r} is not known; use {' or '.join(KINDS)}, as in sha256:<hex>")


def live_sums(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """sha256 of every tensor's values in the checkpoint's own shape, whatever the layout they live in."""
    return {name: checksum("sha256", values(tensor).contiguous().cpu()) for name, tensor in parameters.items()}


def values(tensor: Tensor) -> Tensor:
    """What a sum is taken over: float32 whatever the type of storage."""
    return tensor.float() if tensor.is_floating_point() else tensor


def digest(sums: Mapping[str, str]) -> str:
    """One name for all of it."""
    return hashlib.sha256("\n".join(f"{name} {sums[name]}" for name in sorted(sums)).encode()).hexdigest()
