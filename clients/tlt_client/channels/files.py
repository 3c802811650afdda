"""Safetensors files without torch: what their headers say, what a manifest says of their tensors, and their parts of a push."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tlt_client.channels.errors import ContentRefused

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
          "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}
WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
MAX_HEADER_BYTES = 100 * 10**6  # as the format has it
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # headers


def tensors_of(header: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Its entries in the order of their bytes, which are `length`, without a gap. Raises what is in `MALFORMED`."""
    said = {name: entry for name, entry in header.items() if name != "__metadata__"}
    ordered, end = dict(sorted(said.items(), key=lambda item: tuple(item[1]["data_offsets"]))), 0
    for name, entry in ordered.items():
        shape, (first, last) = entry["shape"], entry["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (first, last, *shape)):
            raise ValueError(f"tensor {name!r} has numbers that are none: {entry}")
        if first != end or last - first != math.prod(shape) * WIDTHS[entry["dtype"]]:
            raise ValueError(f"tensor {name!r} has other bytes than its dtype and shape say, or than follow: {entry}")
        end = last
    if end != length:
        raise ValueError(f"it names {end} bytes of tensors and holds {length}")
    return ordered


def parsed(header: bytes) -> dict[str, Any]:
    """A file's header. Raises what is in `MALFORMED`."""
    content = json.loads(header, object_pairs_hook=_once)
    if not isinstance(content, dict):
        raise ValueError("its header is no object")
    return content


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("its header names something twice")
    return names


class File(NamedTuple):
    """One file's bytes, and what its header says."""

    path: Path
    data: mmap.mmap
    header: dict[str, Any]
    start: int  # of the tensors' bytes

    def entries(self, prefix: str = "") -> Iterator[dict[str, Any]]:
        """As a manifest names its tensors, each with its checksum."""
        for name, said in self.header.items():
            if name != "__metadata__":
                first, last = said["data_offsets"]
                with memoryview(self.data) as view:
                    digest = hashlib.sha256(view[self.start + first : self.start + last]).hexdigest()
                yield {"name": prefix + name, "dtype": DTYPES[said["dtype"]], "shape": said["shape"], "checksum": f"sha256:{digest}"}

    def prefixed(self, prefix: str) -> bytes:
        """The file with other names."""
        names = {name if name == "__metadata__" else prefix + name: said for name, said in self.header.items()}
        header = json.dumps(names).encode()
        return len(header).to_bytes(8, "little") + header + self.data[self.start :]


@contextmanager
def opened(path: Path) -> Iterator[File]:
    """`ContentRefused` when it is no safetensors file."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            size = int.from_bytes(data[:8], "little")
            if not 2 <= size <= min(MAX_HEADER_BYTES, len(data) - 8):
                raise ValueError(f"a header of {size} bytes in a file of {len(data)}")
            header = parsed(data[8 : 8 + size])
            tensors_of(header, len(data) - 8 - size)
        except MALFORMED as error:
            raise ContentRefused(f"{path}: not a whole safetensors file ({error}); write it again") from None
        yield File(path, data, header, 8 + size)
