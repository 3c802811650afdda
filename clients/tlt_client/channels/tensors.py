"""Tensors as bytes: their entries in a manifest, their grouping into files and buckets."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from tlt_client.channels.checksums import mix64, xxh3
from tlt_client.channels.errors import ContentRefused
from tlt_client.channels.files import DTYPES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tlt_client.channels import Announcement

FILE_BYTES = 256 * 2**20  # size of a safetensors file that a trainer's half writes
MAX_TENSOR_BYTES = 2**40


class TensorSpec(NamedTuple):
    """One tensor of a bucket of raw bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    bytes: int


def raw(tensor: Tensor) -> memoryview:
    """Return a contiguous CPU tensor's bytes, row-major, little-endian, without a copy."""
    import torch

    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def entry(name: str, tensor: Tensor, *, checksum: bool) -> dict[str, Any]:
    """Return a tensor's entry in a manifest."""
    fields: dict[str, Any] = {
        "name": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
    }
    if checksum:
        fields["checksum"] = _checksum(tensor)
    return fields


def _checksum(tensor: Tensor) -> str:
    """Return the checksum that is faster on the tensor's device."""
    return mix64(tensor) if tensor.device.type != "cpu" else xxh3(raw(tensor.contiguous()))


def dtype_named(name: str, tensor: str) -> torch.dtype:
    """Return the dtype for a name such as `bfloat16` or `torch.bfloat16`. `tensor`: its name in
    errors.
    """
    import torch

    plain = name.removeprefix("torch.")
    if plain not in DTYPES.values():
        known = ", ".join(DTYPES.values())
        raise ContentRefused(
            f"tensor {tensor!r} has dtype {name[:40]!r}, which no channel carries; use one of "
            f"{known}"
        )
    dtype: torch.dtype = getattr(torch, plain)
    return dtype


def files(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield groups of contiguous tensors on the host, in order, of at most `max_bytes` each; a
    larger tensor is a group of its own.
    """
    group: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        held = tensor.detach().cpu().contiguous()
        if group and size + held.nbytes > max_bytes:
            yield group
            group, size = {}, 0
        group[name] = held
        size += held.nbytes
    if group:
        yield group


def written(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file of contiguous CPU tensors in pieces, without copying their bytes."""
    codes = {dtype: code for code, dtype in DTYPES.items()}
    header, end = {}, 0
    for name, tensor in tensors.items():
        dtype = codes[str(dtype_named(str(tensor.dtype), name)).removeprefix("torch.")]
        header[name] = {
            "dtype": dtype,
            "shape": list(tensor.shape),
            "data_offsets": [end, end := end + tensor.nbytes],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    yield from map(raw, tensors.values())


class Joined:
    """Several pieces of bytes, read as one; only slices are copied."""

    def __init__(self, pieces: Iterable[bytes | memoryview]) -> None:
        self._pieces = [piece for piece in pieces if len(piece)]
        self._ends = list(accumulate(map(len, self._pieces)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, span: slice) -> bytes:
        start, stop, step = span.indices(len(self))
        assert step == 1
        found = []
        for at in range(bisect_right(self._ends, start), len(self._pieces)):
            first = self._ends[at] - len(self._pieces[at])
            if first >= stop:
                break
            found.append(self._pieces[at][max(start - first, 0) : stop - first])
        return b"".join(found)


def spec_of(name: str, dtype: str, shape: Sequence[int] | None) -> TensorSpec:
    """Return the spec of a tensor in a manifest."""
    if not dtype or shape is None:
        raise ContentRefused(
            f"tensor {name!r} has dtype {dtype!r} and shape {shape}; name both in a push whose "
            "tensors come as raw bytes"
        )
    kind = dtype_named(dtype, name)
    size = math.prod(shape) * kind.itemsize
    if size > MAX_TENSOR_BYTES:
        raise ContentRefused(
            f"tensor {name!r} has shape {list(shape)}, which takes {size} bytes; the limit is "
            f"{MAX_TENSOR_BYTES}"
        )
    return TensorSpec(name, kind, tuple(shape), size)


def buckets(specs: Sequence[TensorSpec], bucket_bytes: int | None) -> Iterator[list[TensorSpec]]:
    """Cut tensors into buckets. A bucket closes after the tensor that takes it over `bucket_bytes`;
    None: one bucket per tensor.
    """
    bucket: list[TensorSpec] = []
    size = 0
    for spec in specs:
        bucket.append(spec)
        size += spec.bytes
        if bucket_bytes is None or size > bucket_bytes:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def announced_buckets(push: Announcement, bucket_bytes: int | None) -> list[list[TensorSpec]]:
    """Return the buckets of an announced push, in the order of its manifest's tensors."""
    specs = [spec_of(tensor.name, tensor.dtype, tensor.shape) for tensor in push.tensors]
    return list(buckets(specs, bucket_bytes))


def size_of(bucket: Sequence[TensorSpec]) -> int:
    return sum(spec.bytes for spec in bucket)


def unpacked(bucket: Sequence[TensorSpec], data: Tensor) -> dict[str, Tensor]:
    """Return views of the bucket's bytes; a tensor at a misaligned offset is copied."""
    tensors, start = {}, 0
    for spec in bucket:
        own = data[start : start + spec.bytes]
        tensors[spec.name] = (
            (own.clone() if start % spec.dtype.itemsize else own).view(spec.dtype).view(spec.shape)
        )
        start += spec.bytes
    return tensors
