"""Safetensors files without torch: their headers, the manifest's entries of their tensors, and
their parts of a push.

A header or a manifest may come from anywhere, so each number and name is checked against a limit
before it is used.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Raw, Struct

from tlt_client.channels.checksums import xxh3
from tlt_client.channels.errors import ContentRefused

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
WIDTHS = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
MAX_HEADER_BYTES = 4 * 2**20  # one tensor takes 100 to 150 bytes
MAX_DIMENSIONS, MAX_DIMENSION = 8, 2**48  # dimensions of a tensor, and the length of one
MAX_NAME = 256  # characters of a tensor's name
MAX_QUOTE = 100  # characters of foreign text that a message quotes


class Entry(Struct, frozen=True):
    """A header's entry of one tensor."""

    dtype: Annotated[str, Meta(max_length=16)]
    shape: Annotated[
        list[Annotated[int, Meta(ge=0, le=MAX_DIMENSION)]], Meta(max_length=MAX_DIMENSIONS)
    ]
    data_offsets: tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]]


_names = msgspec.json.Decoder(dict[str, Raw])
_entry = msgspec.json.Decoder(Entry)


def header_bytes(prefix: bytes, whole: int) -> int:
    """Return the length of the header of a file with `whole` bytes that begins with these 8. Raise
    `ValueError` if it is not allowed.
    """
    size = int.from_bytes(prefix, "little")
    if not 2 <= size <= whole - 8:
        raise ValueError(f"a header of {size} bytes in a file of {whole}")
    if size > MAX_HEADER_BYTES:
        raise ValueError(
            f"a header of {size} bytes, the limit is {MAX_HEADER_BYTES}: put the tensors into "
            "several files"
        )
    return size


def tensors_of(header: bytes, length: int) -> dict[str, Entry]:
    """Return the header's entries in the order of their bytes. Raise `ValueError` unless they cover
    `length` bytes without a gap.

    If a name is repeated, the last entry counts; the bytes of the other one are then a gap.
    """
    try:
        entries = {
            name: _read(name, entry)
            for name, entry in _names.decode(header).items()
            if name != "__metadata__"
        }
    except RecursionError:
        raise ValueError("its header has objects within objects") from None
    ordered, end = dict(sorted(entries.items(), key=lambda item: item[1].data_offsets)), 0
    for name, entry in ordered.items():
        first, last = entry.data_offsets
        if first != end or last - first != math.prod(entry.shape) * WIDTHS[entry.dtype]:
            raise ValueError(
                f"tensor {name[:MAX_QUOTE]!r} has bytes {first} to {last}, the next byte is {end}, "
                f"and it is {entry.dtype} of shape {entry.shape}"
            )
        end = last
    if end != length:
        raise ValueError(f"it names {end} bytes of tensors and holds {length}")
    return ordered


def _read(name: str, text: Raw) -> Entry:
    if len(name) > MAX_NAME:
        raise ValueError(
            f"a tensor's name has {len(name)} characters, the limit is {MAX_NAME}: "
            f"{name[:MAX_QUOTE]!r}"
        )
    try:
        entry = _entry.decode(text)
    except ValueError as error:
        raise ValueError(f"tensor {name[:MAX_QUOTE]!r}: {error}") from None
    if entry.dtype not in WIDTHS:
        raise ValueError(
            f"tensor {name[:MAX_QUOTE]!r} has dtype {entry.dtype!r}, which no channel carries; use "
            f"one of {', '.join(WIDTHS)}"
        )
    return entry


class File(NamedTuple):
    """One file's bytes and its header."""

    path: Path
    data: mmap.mmap
    tensors: dict[str, Entry]
    start: int  # offset of the tensors' bytes

    def entries(self, prefix: str = "") -> Iterator[dict[str, Any]]:
        """Yield the manifest's entries of its tensors, each with its checksum."""
        for name, entry in self.tensors.items():
            first, last = entry.data_offsets
            with memoryview(self.data) as view:
                checksum = xxh3(view[self.start + first : self.start + last])
            yield {
                "name": prefix + name,
                "dtype": DTYPES[entry.dtype],
                "shape": entry.shape,
                "checksum": checksum,
            }

    def prefixed(self, prefix: str) -> bytes:
        """Return the file with a prefix before each tensor's name."""
        header = msgspec.json.encode({prefix + name: entry for name, entry in self.tensors.items()})
        return len(header).to_bytes(8, "little") + header + self.data[self.start :]


@contextmanager
def opened(path: Path) -> Iterator[File]:
    """Open a file; raise `ContentRefused` unless it is a safetensors file."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            start = 8 + header_bytes(data[:8], len(data))
            tensors = tensors_of(data[8:start], len(data) - start)
        except ValueError as error:
            raise ContentRefused(
                f"{path}: not a whole safetensors file ({error}); write it again"
            ) from None
        yield File(path, data, tensors, start)
