"""Checksums of tensors: the kinds that a push may declare, and mix64 of the live values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from tlt_client.channels.checksums import finished, xxh3
from tlt_client.channels.tensors import raw
from tlt_server.errors import WeightsRefused
from tlt_server.models.loader import tensor_files
from tlt_server.models.shards import OriginalTensor, SpreadTensor, Stored, whole

KINDS = ("mix64", "sha256", "xxh3")
XXH3_128_DIGITS = 32
PARTS, PART_BYTES = 16, 2**16  # read by `origin_of` in each file


def kind_of(declared: str) -> str:
    """Return the kind of a declared checksum. xxh3 has two lengths."""
    kind, _, digits = declared.partition(":")
    return "xxh3_128" if kind == "xxh3" and len(digits) == XXH3_128_DIGITS else kind


def checksum(kind: str, tensor: Tensor) -> str:
    """Return `kind:hex` for a contiguous tensor: mix64 is of its values, every other kind of its
    bytes (row-major, little-endian).
    """
    if kind == "mix64":
        return mix64(tensor)
    data = raw(tensor.cpu())
    if kind == "sha256":
        return f"sha256:{hashlib.sha256(data).hexdigest()}"
    if kind == "xxh3":
        return f"xxh3:{xxhash.xxh3_64_hexdigest(data)}"
    if kind == "xxh3_128":
        return xxh3(data)
    raise WeightsRefused(
        f"checksum kind {kind[:20]!r} is not known; use {' or '.join(KINDS)}, as in mix64:<hex>"
    )


class Content(NamedTuple):
    sum: str  # mix64 of a tensor's values, the same in every dtype that holds them
    finite: bool


def contents(tensors: Sequence[Tensor]) -> list[Content]:
    """Compute the checksums of tensors. Each tensor is read once, on its device, with one wait per
    device.
    """
    found: dict[int, Content] = {}
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        if device.type == "cuda":
            from tlt_kernels.gpu.checksums import mixed_sums
        else:
            from tlt_kernels.cpu.checksums import mixed_sums
        here = [n for n, tensor in enumerate(tensors) if tensor.device == device]
        sums = mixed_sums([plain(tensors[n]).contiguous() for n in here])
        for n, (total, finite) in zip(here, sums, strict=True):
            found[n] = Content(finished(total, tensors[n].numel()), finite)
    return [found[n] for n in range(len(tensors))]


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor's values in a type that every operation takes: e4m3 in bfloat16."""
    return tensor.bfloat16() if tensor.dtype == torch.float8_e4m3fn else tensor


def mix64(stored: Stored) -> str:
    if isinstance(stored, SpreadTensor):
        return _over_ranks(stored)
    tensor = stored.checked() if isinstance(stored, OriginalTensor) else whole(stored)
    return contents([tensor])[0].sum


def _over_ranks(pieces: SpreadTensor) -> str:
    """Sum over the ranks that hold the slices. Replicated slices count once if they agree;
    otherwise all of them count, so that the sum is wrong whichever replica is damaged.
    """
    if pieces.is_cuda:
        from tlt_kernels.gpu.checksums import placed_sum
    else:
        from tlt_kernels.cpu.checksums import placed_sum

    found: dict[int, list[int]] = {}
    for values_RC, first, distance in pieces.placed():
        found.setdefault(first, []).append(placed_sum(values_RC, first, distance)[0])
    counted = (sums[0] if len({*sums}) == 1 else sum(sums) for sums in found.values())
    return finished(sum(counted), pieces.numel())


def live_sums(parameters: Mapping[str, Stored]) -> dict[str, str]:
    """Return mix64 of every tensor's values in the checkpoint's shape, in any layout."""
    return {name: mix64(tensor) for name, tensor in parameters.items()}


def origin_of(directory: Path) -> str:
    """Return a digest of a checkpoint's content, from its files' sizes and samples of their bytes.
    Reading a whole checkpoint takes as long as loading it.
    """
    found = xxhash.xxh3_128()
    for path in sorted({*tensor_files(directory).values()}):
        size = path.stat().st_size
        found.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for part in range(PARTS):
                file.seek(max(0, size - PART_BYTES) * part // (PARTS - 1))
                found.update(file.read(PART_BYTES))
    return f"sampled:{found.hexdigest()}"
