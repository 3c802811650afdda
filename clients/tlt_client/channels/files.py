"""Safetensors files as they lie on disk, without torch: what a manifest says of their tensors, and their parts of a push."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tlt_client.channels.errors import ContentRefused

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
          "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}
MAX_HEADER_BYTES = 100 * 10**6  # as the format has it


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
            header = json.loads(data[8 : 8 + size])
            for name, said in header.items():
                if name != "__metadata__" and (said["dtype"] not in DTYPES or not 0 <= said["data_offsets"][1] <= len(data) - 8 - size):
                    raise ValueError(f"tensor {name!r} is {said}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ContentRefused(f"{path}: not a whole safetensors file ({error}); write it again") from None
        yield File(path, data, header, 8 + size)
