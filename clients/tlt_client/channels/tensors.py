"""Tensors as bytes: what a manifest says of them, and how many of them make one file or bucket."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from tlt_client.channels.errors import ContentRefused
from tlt_client.channels.files import DTYPES
from tlt_client.channels.sums import mix64, xxh3

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FILE_BYTES = 256 * 2**20  # of one safetensors file that a trainer's half writes
MAX_TENSOR_BYTES = 2**40


class TensorSpec(NamedTuple):
    """Where one tensor lies in a bucket of raw bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    bytes: int


def raw(tensor: Tensor) -> memoryview:
    """A contiguous CPU tensor's bytes, row-major, little-endian; not copied."""
    import torch

    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def entry(name: str, tensor: Tensor, *, checksum: bool) -> dict[str, Any]:
    """As a manifest names it."""
    said: dict[str, Any] = {
        "name": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
    }
    if checksum:
        said["checksum"] = _checksum(tensor)
    return said


def _checksum(tensor: Tensor) -> str:
    """Whichever is quicker where the tensor lies."""
    return mix64(tensor) if tensor.device.type != "cpu" else xxh3(raw(tensor.contiguous()))


def dtype_named(name: str, tensor: str) -> torch.dtype:
    """Of `bfloat16` or `torch.bfloat16`, which `tensor` is said to have."""
    import torch

    plain = name.removeprefix("torch.")
    if plain not in DTYPES.values():
        known = ", ".join(DTYPES.values())
        raise ContentRefused(
            f"tensor {tensor!r} has dtype {name[:40]!r}, which no channel carries; use one of {known}"
        )
    dtype: torch.dtype = getattr(torch, plain)
    return dtype


def files(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Contiguous tensors on the host, grouped in their order into files of at most `max_bytes`; a
    larger tensor has one of its own.
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
    """A safetensors file of contiguous CPU tensors, piece by piece; their bytes are not copied."""
    code = {dtype: said for said, dtype in DTYPES.items()}
    header, end = {}, 0
    for name, tensor in tensors.items():
        dtype = code[str(dtype_named(str(tensor.dtype), name)).removeprefix("torch.")]
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
    """Bytes that lie in several places, read as one: a slice is a copy of what it spans, and
    nothing else is copied.
    """

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
    """Of a tensor that a manifest names."""
    if not dtype or shape is None:
        raise ContentRefused(
            f"tensor {name!r} has dtype {dtype!r} and shape {shape}; a push whose tensors come as raw bytes says both"
        )
    kind = dtype_named(dtype, name)
    size = math.prod(shape) * kind.itemsize
    if size > MAX_TENSOR_BYTES:
        raise ContentRefused(
            f"tensor {name!r} has shape {list(shape)}, which takes {size} bytes; the limit is {MAX_TENSOR_BYTES}"
        )
    return TensorSpec(name, kind, tuple(shape), size)


def buckets(specs: Sequence[TensorSpec], bucket_bytes: int | None) -> Iterator[list[TensorSpec]]:
    """How tensors are cut into buckets: one closes after the tensor that takes it over
    `bucket_bytes`; None: one each.
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


def size_of(bucket: Sequence[TensorSpec]) -> int:
    return sum(spec.bytes for spec in bucket)


def unpacked(bucket: Sequence[TensorSpec], data: Tensor) -> dict[str, Tensor]:
    """Views of the bucket's bytes; a tensor that lies askew is copied."""
    tensors, start = {}, 0
    for spec in bucket:
        own = data[start : start + spec.bytes]
        tensors[spec.name] = (
            (own.clone() if start % spec.dtype.itemsize else own).view(spec.dtype).view(spec.shape)
        )
        start += spec.bytes
    return tensors
